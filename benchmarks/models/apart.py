"""One cell in one mode: compile every contender, check it, time all of them in turn, and look where the time goes."""

from __future__ import annotations

from .cell_run import CellRun, begin, compile_order, contender_of, forget_compiled, weights_of
from .cells import Cell
from .look import look, look_inside
from .plan import Entry, Place, Plan, Row


def run_cell(cell: Cell, plan: Plan, place: Place) -> list[Row]:
    """The cell's rows, one a contender; collective over the pair."""
    run = begin(cell, plan, place, weights_of(cell, place))
    for name in cell.contenders(plan.contenders, plan.device):
        contender = contender_of(run, name, place, cell.graphs)
        run.entries[name] = Entry(contender, contender.call(cell.graphs))
    _measure(run)
    rows = run.rows()
    del run
    forget_compiled()
    return rows


def _measure(run: CellRun) -> None:
    """Forward is compiled and measured before forward with backward is compiled, so that a run that is stopped has it;
    with `quiet` both are compiled first.
    """
    order = compile_order(run.cell, run.entries)
    if run.cell.graphs:  # a contender that fails takes the others' compiled code with it: the one that may goes first
        order.sort(key=lambda name: name != "async_tp")
    for passes in [run.passes] if run.plan.quiet else [(one,) for one in run.passes]:
        for name in order:
            run.compile(name, "cold", passes)
        run.turn.stop_compiling()
        for which in passes if not run.plan.compiles_only else ():
            check_and_race(run, which)
            run.truths.clear()
            if run.plan.looks_at(run.cell) or which != run.passes[-1]:
                run.publish(run.rows())
            if run.plan.looks_at(run.cell):
                look(run, which)
    if run.cell.graphs and run.plan.looks_at(run.cell):
        run.publish(run.rows())
        for which in run.passes:
            look_inside(run, which)
    run.compile_again(order)


def check_and_race(run: CellRun, which: str) -> None:
    """Judge a pass, in one turn with the 20 steps of training, and time it; or do what the plan leaves of it."""
    exact = None if which in run.truths else run.in_fp32()
    with run.turn.kept():
        if which not in run.truths:
            run.find_truth(which, exact)
        run.check(which)
        if which == "fwdbwd":
            run.losses()
        if run.plan.times:
            run.time(which)
