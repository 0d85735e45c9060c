"""Tile and schedule of a launch: from the planner's plan, or by the kernels' own model where there is no planner."""

from __future__ import annotations

from collections.abc import Callable

from mkcompile.plan.plan import Plan
from mkcompile.plan.table import PlanTable
from mkcompile.runtime.form import Form, Reduction
from mkcompile.runtime.kernel_config import TILES, KernelConfig
from mkcompile.runtime.tile_schedule import TileSchedule, choose_schedule, choose_tile

#: Kernels that the launcher has, for the planner's policy.
AVAILABLE = frozenset({"gemm_reduce_scatter/push", "gemm_all_reduce/staged"})

Tactic = tuple[KernelConfig, TileSchedule]
#: By what all ranks share; the last argument is the largest grid. None: the reference computes the call.
Tactics = Callable[[Reduction, Form, int], Tactic | None]


def modelled(call: Reduction, form: Form, max_grid: int) -> Tactic:
    """By the model that the kernels were measured with; always a kernel."""
    config = choose_tile(form.config, form.size, max_grid)
    return config, choose_schedule(config, form.size, max_grid)


def planned(table: PlanTable) -> Tactics:
    """By the planner's table, which is the same on every rank."""

    def tactics(call: Reduction, form: Form, max_grid: int) -> Tactic | None:
        return from_plan(form, table.plan(call.problem()), max_grid)

    return tactics


def from_plan(form: Form, plan: Plan, max_grid: int) -> Tactic | None:
    """The plan in the kernels' terms; None where it is to leave the call unfused."""
    if f"{plan.operator}/{plan.variant}" not in AVAILABLE or (plan.tile.rows, plan.tile.columns) not in TILES:
        return None
    config = form.config.with_tile(plan.tile.rows, plan.tile.columns)
    grid = min(plan.grid, max_grid)
    return config, TileSchedule(grid=grid, raster_group=plan.raster, lag=max(1, plan.lag), pace_ns=plan.pace_ns)
