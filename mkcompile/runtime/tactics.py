"""Kernel, tile and schedule of a launch: the planner's plan in the kernels' terms."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from mkcompile.config import settings
from mkcompile.ops.groups import find
from mkcompile.ops.registry import Call
from mkcompile.plan.decide import Policy
from mkcompile.plan.kernels import launchable
from mkcompile.plan.key import fuse_of
from mkcompile.plan.placement import placed
from mkcompile.plan.plan import Plan
from mkcompile.runtime.agree import Agreement
from mkcompile.runtime.form import Form
from mkcompile.runtime.gather_form import GatherForm
from mkcompile.runtime.gather_schedule import (
    GatherChoice,
    can_share,
    can_stream_gather,
    engine_choice,
    fastest_gather,
    library_choice,
    pull_choice,
    push_choice,
    read_choice,
    shared_choice,
    stream_choice,
)
from mkcompile.runtime.kernel_config import GATHER_TILES, SHARED_GATHER_TILES, TILES, KernelConfig
from mkcompile.runtime.network_gather import network_choice
from mkcompile.runtime.published import Basis, Published
from mkcompile.runtime.stream_schedule import StreamForm, Way, can_stream, stream_tactic
from mkcompile.runtime.tile_schedule import TileSchedule

_LOG = logging.getLogger(__name__)
_USUAL_GRID = 128
_WAYS: Mapping[str, Way] = {"turns": "turns", "handed": "handed", "ends": "ends"}
_FEW_ROWS = frozenset({"gemm_reduce_scatter/stream", "gemm_all_reduce/stream"})
_STAGED, _DIRECT = "gemm_all_reduce/staged", "gemm_all_reduce/direct"

Tactic = tuple[KernelConfig, TileSchedule]


class Tactics(Protocol):
    """How calls are carried out, by what all ranks share. None: the reference computes the call.

    `max_grid`: blocks of the largest launch.
    """

    def __call__(self, call: Call, form: Form, max_grid: int) -> Tactic | None: ...
    def gather(self, call: Call, form: GatherForm, max_grid: int) -> GatherChoice | None: ...


class Planned:
    """By the planner, from what the group's rank 0 has told; the ranks compare the plan before it is launched.

    A call's plan key says by which policy: `auto` leaves to the reference what would gain nothing; what was called by
    hand gets the best kernel there is.
    """

    def __init__(
        self, own: Callable[[], Basis], agreement: Agreement | None = None, available: frozenset[str] | None = None
    ) -> None:
        """`own`: what this process tells the groups whose rank 0 it is."""
        self._own = own
        blocking = settings().launches_block
        self._available = available if available is not None else launchable(blocking)
        if blocking:
            _LOG.info("CUDA_LAUNCH_BLOCKING is set: all-gathers do not use the copy engine")
        self._agreement = agreement or Agreement()
        self._published = Published(topic="launch")

    def __call__(self, call: Call, form: Form, max_grid: int) -> Tactic | None:
        """Collective where the problem is new.

        Raises: AbsentRankError for a rank 0 that does not come; PlanMismatchError, with the ranks whose plans differ.
        """
        stays = form.config.broadcast == "direct"
        available = self._available - {_STAGED} | {_DIRECT} if stays else self._available
        tactic = from_plan(form, self._agreed(call, max_grid, available), max_grid)
        arena_bytes = settings().arena_bytes  # of all ranks: groups whose ranks differ launch nothing
        if tactic is None or not tactic[0].streams or can_stream(tactic[0], form.size, arena_bytes):
            return tactic
        _LOG.warning(
            "%s of %s: the mailboxes of the kernels for few rows have no room in %d bytes, another one is taken; "
            "raise MKCOMPILE_ARENA_BYTES", call.NAME, form.size, arena_bytes,
        )  # fmt: skip
        return from_plan(form, self._agreed(call, max_grid, available - _FEW_ROWS), max_grid)

    def gather(self, call: Call, form: GatherForm, max_grid: int) -> GatherChoice | None:
        """As above."""
        return gather_from_plan(form, self._agreed(call, max_grid, self._available), max_grid)

    def _agreed(self, call: Call, max_grid: int, available: frozenset[str]) -> Plan:
        basis = self._published.of(find(call.group), self._own)
        problem = placed(call.problem(), basis.placement)
        reserve = max(0, basis.topology.gpu.num_sms - max_grid)
        policy = Policy(fuse=fuse_of(call.plan_key), reserve_sms=reserve, available=available)
        plan = basis.table(policy).launch(problem)
        name = f"plan of {problem.key()}"
        self._agreement.reach(call.group, (name, plan), f"{name}, m={problem.m}: {plan.to_json()}")
        return plan


class Given:
    """By plans that are named in the calls' plan keys: what `tune` measures."""

    def __init__(self, plans: Mapping[str, Plan]) -> None:
        self._plans = plans

    def __call__(self, call: Call, form: Form, max_grid: int) -> Tactic | None:
        """Raises: KeyError for a plan that was not given."""
        return from_plan(form, self._plans[call.plan_key], max_grid)

    def gather(self, call: Call, form: GatherForm, max_grid: int) -> GatherChoice | None:
        """Raises: KeyError for a plan that was not given."""
        return gather_from_plan(form, self._plans[call.plan_key], max_grid)


def from_plan(form: Form, plan: Plan, max_grid: int) -> Tactic | None:
    """The plan in the kernels' terms; None where it is to leave the call unfused."""
    tile = (plan.tile.rows, plan.tile.columns)
    if plan.variant == "stream":
        way = _WAYS.get(plan.transport)
        return stream_tactic(form.config, form.size, StreamForm(tile, plan.split, way), plan.roles.num_sms)
    if plan.variant not in ("push", "staged", "direct") or tile not in TILES:
        return None
    schedule = TileSchedule(
        grid=min(plan.grid, max_grid), raster_group=plan.raster, lag=max(1, plan.lag), pace_ns=plan.pace_ns
    )
    return form.config.with_tile(*tile), schedule


def _shape_of(form: GatherForm, plan: Plan) -> tuple[tuple[int, int], int]:
    """Tile, and blocks that share one. Of weights of different widths a plan knows the sum only: then what is best for
    these, the same on every rank.
    """
    best = None
    if len(set(form.size.n)) > 1:
        best = fastest_gather(form.config, form.size, _USUAL_GRID, form.returned, plan.variant)  # type: ignore[arg-type]
    if best is None:
        return (plan.tile.rows, plan.tile.columns), plan.split
    return (best.config.block_m, best.config.block_n), best.config.split


def gather_from_plan(form: GatherForm, plan: Plan, max_grid: int) -> GatherChoice | None:
    """The same for an all-gather; its order and what is sent together follow the size."""
    tile = (plan.tile.rows, plan.tile.columns)
    if form.config.network != "none":
        return network_choice(form.config.with_tile(*tile), form.size, max_grid, form.returned) if plan.fused else None
    if plan.variant == "library":
        chunks = max(1, round(form.size.shard_bytes / plan.chunk_bytes)) if plan.chunk_bytes else 1
        return library_choice(form.config, form.size, chunks)
    if plan.variant == "stream":
        streamed = StreamForm(tile, plan.split)
        possible = can_stream_gather(form.size, streamed, form.returned)
        return stream_choice(form.config, form.size, max_grid, streamed) if possible else None
    if plan.variant not in ("push", "pull", "remote_read", "copy_engine") or tile not in GATHER_TILES:
        return None
    tile, split = _shape_of(form, plan)
    config = replace(form.config.with_tile(*tile), returns=form.returned)
    if plan.variant == "pull":
        return None if form.returned else pull_choice(config, form.size, max_grid)
    if plan.variant == "push":
        if split > 1 and can_share(form.size, form.returned) and tile in SHARED_GATHER_TILES:
            return shared_choice(config, form.size, max_grid)
        return push_choice(config, form.size, max_grid, form.returned)
    if plan.variant == "remote_read":
        return None if form.returned else read_choice(config, form.size, max_grid)
    return engine_choice(config, form.size, max_grid)
