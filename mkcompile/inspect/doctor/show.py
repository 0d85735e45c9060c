"""A diagnosis on a terminal and as JSON."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mkcompile.inspect.doctor.check import Check, Diagnosis, Section, Status
from mkcompile.inspect.plain import plain

_MARKS: dict[Status, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "off": ("off", "dim"),
    "missing": ("missing", "yellow"),
    "broken": ("broken", "red"),
}


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Sections, then what to do, then the verdict."""
    for section in diagnosis.sections:
        console.print(_table(section))
        if section.matrix:
            console.print(_matrix(section))
    lacking = [one for one in diagnosis.checks if one.status != "ok"]
    if lacking:
        console.print(_advice(lacking))
    console.print(_verdict(diagnosis))


def _table(section: Section) -> Table:
    table = Table(title=section.title, title_justify="left", title_style="bold", box=box.SIMPLE, show_header=False)
    table.add_column(min_width=20)
    table.add_column(min_width=7)
    table.add_column(overflow="fold")
    for one in section.checks:
        mark, style = _MARKS[one.status]
        table.add_row(one.name, Text(mark, style), Text(one.found))
    return table


def _matrix(section: Section) -> Table:
    header, *rows = section.matrix
    table = Table(*header, title="peer access and NVLinks", title_justify="left", box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*(Text(cell, "red" if cell.startswith("NO") else "") for cell in row))
    return table


def _advice(lacking: list[Check]) -> Table:
    table = Table(title="What is missing", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("")
    table.add_column("what it costs", ratio=1)
    table.add_column("how to get it", ratio=1)
    for one in lacking:
        table.add_row(Text(one.name, _MARKS[one.status][1]), Text(one.cost), Text(one.remedy))
    return table


def _verdict(diagnosis: Diagnosis) -> Text:
    if diagnosis.can_run_kernels:
        return Text("The backend runs here, with the fused kernels.", "bold green")
    if diagnosis.can_run:
        return Text("The backend runs here, with reference operators (no fused kernels).", "bold yellow")
    return Text("The backend can't run here.", "bold red")


def diagnosis_to_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    """Plain JSON values."""
    values: dict[str, Any] = plain(diagnosis)
    return {"can_run": diagnosis.can_run, "can_run_kernels": diagnosis.can_run_kernels, **values}
