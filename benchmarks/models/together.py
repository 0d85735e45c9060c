"""Both modes of a model and size in one pair of processes: what is compiled once runs with CUDA graphs and without.

Inductor generates the same code for both modes, and compiling takes most of a cell's time. Two things differ without
CUDA graphs: inputs that are known to be aligned are not looked at again, and results that peers store into are planned
only where the code is compiled for no graph. A contender of ours that plans results is therefore compiled twice.
"""

from __future__ import annotations

from dataclasses import replace

from mkcompile.config import split_options

from .apart import check_and_race, run_cell
from .cell_run import CellRun, begin, compile_order, contender_of, forget_compiled, weights_of
from .cells import VARIANT, Cell, Unit
from .look import look, look_inside
from .plan import Entry, Place, Plan, Row

#: Fails under CUDA graphs at some sizes, and leaves their memory so that others fail behind it: it is the last.
_LAST = "async_tp"
_MUST_RUN = ("inductor", "mkernel")


def run_unit(unit: Unit, plan: Plan, place: Place) -> list[Row]:
    """The rows of a cell, or of both modes; collective over the pair.

    Where both modes have one compilation and only the one with CUDA graphs has an error, it is compiled by itself.
    """
    apart = replace(plan, together=False)
    if len(unit) == 1:
        return run_cell(unit[0], apart, place)
    rows = run_both((unit[0], unit[1]), plan, place)
    failed = {(row["mode"], row["contender"]) for row in rows if "error" in row}
    again = any((unit[1].mode, name) in failed and (unit[0].mode, name) not in failed for name in _MUST_RUN)
    return [row for row in rows if row["mode"] == unit[0].mode] + run_cell(unit[1], apart, place) if again else rows


def run_both(cells: tuple[Cell, Cell], plan: Plan, place: Place) -> list[Row]:
    """The rows of the mode without CUDA graphs, then of that with; collective over the pair."""
    without, with_graphs = cells
    load = weights_of(without, place)
    plain, captured, last = (begin(cell, plan, place, load) for cell in (without, with_graphs, with_graphs))
    wanted = with_graphs.contenders(plan.contenders, plan.device)
    own: list[str] = []
    for name in without.contenders(plan.contenders, plan.device):
        shared = name in wanted and not _plans_results(name, without, plan)
        contender = contender_of(plain, name, place, graphs=shared)
        plain.entries[name] = Entry(contender, contender.call(graphs=False))
        if name in wanted:
            entered = contender if shared else contender_of(captured, name, place, graphs=True)
            (last if name == _LAST else captured).entries[name] = Entry(entered, entered.call(graphs=True))
            own += [] if shared else [name]
    for passes in [plain.passes] if plan.quiet else [(one,) for one in plain.passes]:
        for which in passes:
            _compile(plain, captured, which, own)
        plain.turn.stop_compiling()
        for which in passes if not plan.compiles_only else ():
            _measure(plain, captured, last, which, own)
    if not plan.compiles_only:
        _end(plain, captured, last)
    plain.compile_again(compile_order(without, plain.entries))
    rows = [*plain.rows(), *captured.rows(), *last.rows()]
    del plain, captured, last, load
    forget_compiled()
    return rows


def _plans_results(name: str, cell: Cell, plan: Plan) -> bool:
    options = {"mkernel": plan.options, VARIANT: plan.variant}.get(name)
    return options is not None and cell.form != "sequence" and split_options(options)[0].results == "planned"


def _compile(plain: CellRun, captured: CellRun, which: str, own: list[str]) -> None:
    for name in compile_order(plain.cell, plain.entries):
        plain.compile(name, "cold", (which,))
    for name in own:
        captured.compile(name, "cold", (which,))


def _measure(plain: CellRun, captured: CellRun, last: CellRun, which: str, own: list[str]) -> None:
    """One pass in both modes; the second is judged by what the first found to be right."""
    check_and_race(plain, which)
    _look(plain, which)
    captured.curve = last.curve = plain.curve
    captured.truths = plain.truths
    _capture(captured, plain, which, own)
    plain.truths.clear()


def _capture(captured: CellRun, plain: CellRun, which: str, own: list[str]) -> None:
    with captured.turn.kept():
        for name in captured.entries:
            if name not in own:
                captured.adopt(name, which, plain.entries[name])
        if captured.working:
            check_and_race(captured, which)
    _look(captured, which)


def _end(plain: CellRun, captured: CellRun, last: CellRun) -> None:
    """What may fail, and take the others' graphs with it: the rows that there are have been written."""
    if last.entries:
        for which in plain.passes:
            _capture(last, plain, which, [])
            last.truths.clear()
    if captured.plan.looks_at(captured.cell):
        for which in captured.passes:
            look_inside(captured, which)
        captured.publish(captured.rows())


def _look(run: CellRun, which: str) -> None:
    run.publish(run.rows())
    if run.plan.looks_at(run.cell):
        look(run, which)
        run.publish(run.rows())
