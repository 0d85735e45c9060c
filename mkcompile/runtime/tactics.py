"""Kernel, tile and schedule of a launch: the planner's plan in the kernels' terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mkcompile.ops.groups import find
from mkcompile.ops.registry import Call
from mkcompile.plan.decide import Policy
from mkcompile.plan.key import fuse_of
from mkcompile.plan.plan import Plan
from mkcompile.runtime.agree import Agreement
from mkcompile.runtime.form import Form
from mkcompile.runtime.kernel_config import TILES, KernelConfig
from mkcompile.runtime.published import Basis, Published
from mkcompile.runtime.tile_schedule import TileSchedule

#: Kernels that the launcher has, for the planner's policy.
AVAILABLE = frozenset({"gemm_reduce_scatter/push", "gemm_all_reduce/staged"})

Tactic = tuple[KernelConfig, TileSchedule]
#: By what all ranks share; the last argument is the largest grid. None: the reference computes the call.
Tactics = Callable[[Call, Form, int], Tactic | None]


class Planned:
    """By the planner, from what the group's rank 0 has told; the ranks compare the plan before it is launched.

    A call's plan key says by which policy: `auto` leaves to the reference what would gain nothing; what was called by
    hand gets the best kernel there is.
    """

    def __init__(self, own: Callable[[], Basis], agreement: Agreement | None = None) -> None:
        """`own`: what this process tells the groups whose rank 0 it is."""
        self._own = own
        self._agreement = agreement or Agreement()
        self._published = Published(topic="launch")

    def __call__(self, call: Call, form: Form, max_grid: int) -> Tactic | None:
        """Collective where the problem is new.

        Raises: AbsentRankError for a rank 0 that does not come; PlanMismatchError, with the ranks whose plans differ.
        """
        plan = self.plan(call, max_grid)
        name = f"plan of {call.problem().key()}"
        self._agreement.reach(call.group, (name, plan), f"{name}, m={call.problem().m}: {plan.to_json()}")
        return from_plan(form, plan, max_grid)

    def plan(self, call: Call, max_grid: int) -> Plan:
        """The plan of a call on a grid of at most so many blocks."""
        basis = self._published.of(find(call.group), self._own)
        reserve = max(0, basis.topology.gpu.num_sms - max_grid)
        policy = Policy(fuse=fuse_of(call.plan_key), reserve_sms=reserve, available=AVAILABLE)
        return basis.table(policy).launch(call.problem())


class Given:
    """By plans that are named in the calls' plan keys: what `tune` measures."""

    def __init__(self, plans: Mapping[str, Plan]) -> None:
        self._plans = plans

    def __call__(self, call: Call, form: Form, max_grid: int) -> Tactic | None:
        """Raises: KeyError for a plan that was not given."""
        return from_plan(form, self._plans[call.plan_key], max_grid)


def from_plan(form: Form, plan: Plan, max_grid: int) -> Tactic | None:
    """The plan in the kernels' terms; None where it is to leave the call unfused."""
    if f"{plan.operator}/{plan.variant}" not in AVAILABLE or (plan.tile.rows, plan.tile.columns) not in TILES:
        return None
    config = form.config.with_tile(plan.tile.rows, plan.tile.columns)
    grid = min(plan.grid, max_grid)
    return config, TileSchedule(grid=grid, raster_group=plan.raster, lag=max(1, plan.lag), pace_ns=plan.pace_ns)
