"""The variants of this project's kernels at few rows: what the runtime chooses, and all that it could choose."""

from __future__ import annotations

from dataclasses import replace

from mkcompile.ops.problem import Problem
from mkcompile.plan.decide import Policy, decide
from mkcompile.plan.topology import preset
from mkcompile.runtime.form import Form
from mkcompile.runtime.kernel_config import KernelConfig, OperatorName
from mkcompile.runtime.stream_schedule import StreamForm, can_stream, stream_configs, stream_schedule, stream_tactic
from mkcompile.runtime.tactics import from_plan
from mkcompile.runtime.tile_schedule import LaunchSize

from .shapes import Shape
from .small_contenders import Variant, default_configs, default_variant, max_grid, num_sms, size_of

Named = list[tuple[str, Variant]]
_MOST_WAVES = 4
# Few rows lie in few slices of L2: blocks may begin at different ones.
_STAGGERED_ROWS = 32


def chosen_variants(op: OperatorName, shape: Shape, world: int) -> Named:
    """By the planner; the GEMM alone, which no operator launches, by what the sweep says."""
    if op == "gemm":
        return [("mkcompile", _gemm_variant(size_of(op, shape, world)))]
    planned = [(name, _planned(config, shape, world)) for name, config in default_configs(op)]
    if planned[0][1].config.streams:  # the same whichever way the others store their results
        return [("mkcompile", planned[0][1])]
    return planned


def _planned(config: KernelConfig, shape: Shape, world: int) -> Variant:
    """The planner's choice among the streaming kernels and the others that store results in the config's way."""
    size = size_of(config.operator, shape, world)
    problem = Problem(
        operator=config.operator, m=shape.m, n=shape.n, k=shape.k, world_size=world, dtype="bfloat16", dtype_bytes=2
    )
    variant = {"gemm_reduce_scatter": "push"}.get(config.operator, config.broadcast)
    available = frozenset({f"{config.operator}/{variant}", f"{config.operator}/stream"})
    policy = Policy(fuse="always", reserve_sms=num_sms() - max_grid(), available=available)
    plan = decide(problem, preset("2xh200"), policy).plan
    form = Form(config=config, size=size, out_shape=(shape.m, shape.n), scale=1.0)
    tactic = from_plan(form, plan, max_grid())
    assert tactic is not None, plan
    return Variant(config=tactic[0], schedule=tactic[1])


def _gemm_variant(size: LaunchSize) -> Variant:
    rows = 64 if size.m <= 64 else 128
    columns = 64 if size.m <= 128 else 128
    tiles = -(-size.m // rows) * -(-size.n // columns)
    split = 2 if 2 * tiles <= num_sms() else 1
    config, schedule = stream_tactic(KernelConfig(), size, StreamForm((rows, columns), split), num_sms())
    return Variant(config=config, schedule=schedule)


def swept_variants(op: OperatorName, shape: Shape, world: int) -> Named:
    """The runtime's choice of tiles, and every streaming kernel that is not absurd."""
    size = size_of(op, shape, world)
    found = [
        (f"{name} {variant.text}", variant)
        for name, base in default_configs(op)
        for variant in [default_variant(base, size, max_grid())]
    ]
    for config in stream_configs(default_configs(op)[0][1]):
        if not _is_sensible(config, size):
            continue
        chosen = stream_schedule(config, size, num_sms())
        staggered = replace(chosen, lag=1) if size.m <= _STAGGERED_ROWS else chosen
        schedules = {chosen, replace(chosen, pace_ns=0), staggered}
        for schedule in sorted(schedules, key=lambda one: (one.lag, one.pace_ns)):
            variant = Variant(config=config, schedule=schedule)
            found.append((f"mkcompile {variant.text}", variant))
    return found


def _is_sensible(config: KernelConfig, size: LaunchSize) -> bool:
    """Not too few blocks, not too many waves, not mostly padding."""
    waves, tile_n = size.tiles(config) * config.split / num_sms(), config.block_n
    wastes = (config.block_m == 128 and size.m <= 64) or (config.block_m == 64 and size.m > 128)
    idles = (config.ping_pong and waves <= 1) or (config.split > 1 and waves > 1 and not config.ping_pong)
    slow = config.block_n == 32 or (config.split == 4 and not config.ping_pong) or (size.m >= 512 and tile_n == 64)
    fits = can_stream(config, size) and 0.4 <= waves <= _MOST_WAVES * config.split
    return fits and not (wastes or idles or slow)
