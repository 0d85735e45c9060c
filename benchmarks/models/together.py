"""Both modes of a model and size in one pair of processes: what is compiled once runs with CUDA graphs and without.

Inductor generates the same code for both modes, and compiling takes most of a cell's time. Two things differ without
CUDA graphs: inputs that are known to be aligned are not looked at again, and results that peers store into are planned
only where the code is compiled for no graph. A contender of ours that plans results is therefore compiled twice.
"""

from __future__ import annotations

from dataclasses import replace

from mkcompile.config import split_options

from .cell_run import CellRun, begin, contender_of, forget_compiled, race, run_cell, weights_of
from .cells import VARIANT, Cell, Unit
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
    captured.truths = plain.truths
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
        for which in passes:
            _measure(plain, captured, which, own)
    if last.entries:
        for which in plain.passes:
            _capture(last, plain, which, [])
    rows = [*plain.rows(), *captured.rows(), *last.rows()]
    del plain, captured, last, load
    forget_compiled()
    return rows


def _plans_results(name: str, cell: Cell, plan: Plan) -> bool:
    options = {"mkernel": plan.options, VARIANT: plan.variant}.get(name)
    return options is not None and cell.form != "sequence" and split_options(options)[0].results == "planned"


def _compile(plain: CellRun, captured: CellRun, which: str, own: list[str]) -> None:
    for name in plain.entries:
        plain.compile(name, "cold", (which,))
    for name in own:
        captured.compile(name, "cold", (which,))


def _measure(plain: CellRun, captured: CellRun, which: str, own: list[str]) -> None:
    """One pass in both modes; the second keeps what the first found to be right."""
    plain.find_truth(which)
    _check_and_time(plain, which)
    _capture(captured, plain, which, own)
    plain.truths.clear()


def _capture(captured: CellRun, plain: CellRun, which: str, own: list[str]) -> None:
    for name in captured.entries:
        if name not in own:
            captured.adopt(name, which, plain.entries[name])
    if captured.working:
        _check_and_time(captured, which)


def _check_and_time(run: CellRun, which: str) -> None:
    run.check(which)
    race(run, which)
    run.publish(run.rows())
    if run.plan.looks_at(run.cell):
        run.look(which)
        run.publish(run.rows())
