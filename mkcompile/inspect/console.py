"""The report on a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mkcompile.inspect.findings import Findings, Totals
from mkcompile.inspect.rows import Collective
from mkcompile.inspect.units import bytes_text, percent, time_text
from mkcompile.passes.reason import Residual

LOG_WIDTH = 160
# Below it what a collective is goes into one column, line by line: half a name says nothing.
_NARROW = 140


def terminal() -> Console:
    """As wide as the terminal; in a log wide enough for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, LOG_WIDTH))


def print_report(report: Findings, console: Console) -> None:
    """Refusals with what to do about them, then what was fused, then the totals."""
    title = Text.assemble(("mkcompile explain  ", "bold"), (report.model, "bold cyan"))
    console.print(title)
    console.print(f"torch {report.torch_version}, topology {report.topology}, captured in {report.capture_s:.1f} s")
    for note in report.notes:
        console.print(note)
    if report.collectives:
        console.print(_table(report, narrow=console.width < _NARROW))
    _print_references(report, console)
    _print_refusals(report, console)
    _print_residuals(report, console)
    for one in report.breaks:
        console.print(Text.assemble(("graph break ", "bold yellow"), (one.where, "bold"), f": {one.sentence}"))
    if report.folded:
        console.print(f"{report.folded} further collectives were folded into others before that (sums, duplicates)")
    if report.collectives:
        _print_totals(report, console)


def _table(report: Findings, *, narrow: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("#", "collective") if narrow else ("#", "phase", "collective", "group", "over", "shape"):
        table.add_column(name, overflow="fold")
    table.add_column("became", style="green", overflow="fold")
    for name in ("unfused", "fused", "ceiling"):
        table.add_column(name, justify="right", no_wrap=True)
    tuned = any(one.estimate and one.estimate.measured_unfused_s is not None for one in report.collectives)
    if tuned:
        table.add_column("measured: unfused, fused", justify="right")
    for one in report.collectives:
        phase, kind, group, transport, shape = what = _what(one)
        lines = [f"{phase} {kind}\n{shape}\ngroup {group}, {transport}"] if narrow else what
        table.add_row(str(one.site), *lines, *_cells(one, tuned))
    return table


def _what(one: Collective) -> list[str]:
    """Phase, kind, group, transport, shape."""
    shape = f"{one.dtype}[{','.join(one.shape)}]"
    return [one.phase, one.kind, f"{one.group} x{one.world_size or '?'}", one.transport, shape]


def _cells(one: Collective, tuned: bool) -> list[str | Text]:
    became = Text(one.operator) if one.operator else Text(f"kept: {one.reason.name if one.reason else ''}", "yellow")
    estimate = one.estimate
    measured = (estimate.measured_unfused_s, estimate.measured_fused_s) if estimate else (None, None)
    times = (estimate.unfused_s, estimate.fused_s, estimate.ceiling_s) if estimate else (None, None, None)
    return [became, *map(time_text, times), *([", ".join(map(time_text, measured))] if tuned else [])]


def _print_references(report: Findings, console: Console) -> None:
    by_sentence: dict[str, dict[str, None]] = {}
    for one in report.collectives:
        if one.by_reference and one.estimate:
            by_sentence.setdefault(one.estimate.decision.removeprefix("keep: "), {})[f"#{one.site}"] = None
    for sentence, sites in by_sentence.items():
        text = f": {sentence}; the operator runs as its reference, GEMM and then collective: no gain is predicted"
        console.print(Text.assemble(("by reference ", "bold yellow"), (" ".join(sites), "bold"), text))


def _print_refusals(report: Findings, console: Console) -> None:
    by_sentence: dict[str, list[str]] = {}
    for one in report.refused():
        by_sentence.setdefault(one.reason.value if one.reason else "", []).append(f"#{one.site}")
    for sentence, sites in by_sentence.items():
        console.print(Text.assemble(("kept ", "bold yellow"), (" ".join(sites), "bold"), f": {sentence}"))


def _print_residuals(report: Findings, console: Console) -> None:
    by_fate: dict[Residual, dict[str, None]] = {}
    for one in report.collectives:
        if one.residual is not None:
            by_fate.setdefault(one.residual, {})[f"#{one.site}"] = None
    for fate, sites in by_fate.items():
        heading, colon, why = fate.sentence.partition(":")
        style = "bold green" if fate is Residual.ADDED else "bold yellow"
        console.print(Text.assemble((heading, style), " ", (" ".join(sites), "bold"), colon + why))


def _print_totals(report: Findings, console: Console) -> None:
    console.print(Text.assemble(("compiled  ", "bold"), totals_text(report.totals)))
    scale = report.extrapolation
    if scale:
        console.print(
            Text.assemble((f"{scale.layers} layers ", "bold"), totals_text(scale.total)),
            f"[dim](from {scale.compiled} layers: each further one adds {totals_text(scale.layer)})[/dim]",
        )


def totals_text(totals: Totals) -> str:
    """One line: counts, bytes, and the predicted gain where there is one."""
    text = (
        f"{totals.fused:.0f} of {totals.collectives:.0f} collectives fused into {totals.operators:.0f} operators, "
        f"{bytes_text(totals.sent_bytes)} sent by each rank"
    )
    if totals.step_unfused_s:
        unfused, fused = time_text(totals.step_unfused_s), time_text(totals.step_fused_s)
        saved = percent(totals.saving_s, totals.step_unfused_s)
        text += f"; predicted step {unfused} as it is, {fused} fused ({saved} saved)"
    return text
