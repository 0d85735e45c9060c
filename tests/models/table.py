"""Prints what is found today: `python -m tests.models.table --world 2 [--only dtensor]`; the tests pin it."""

from __future__ import annotations

import argparse
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

from tests.models.harness import Cell, Error, Result, run_cell
from tests.models.zoo import ZOO
from tests.spawn import Outcomes, run_cases


def cells(only: str, dtypes: list[torch.dtype], batches: list[int]) -> dict[str, Cell]:
    """The cells whose name holds `only`."""
    every = [
        Cell(model=model, trains=trains, dtype=dtype, batch=batch)
        for model in ZOO
        for trains in (False, True)
        for dtype in dtypes
        for batch in batches
    ]
    return {cell.name: cell for cell in every if only in cell.name}


def ratio(error: Error) -> float:
    """Compiled error over eager error, by rms."""
    return error.compiled_rms / max(error.eager_rms, 1e-30)


def _fill(table: Table, name: str, outcomes: Outcomes) -> None:
    failed = [error for error in outcomes.errors(name) if error is not None]
    if failed:
        table.add_row(name, f"[red]{failed[0].kind}: {failed[0].message[-400:]}", "", "")
        return
    results: list[Result] = outcomes.values(name)
    same = all(result.sites == results[0].sites for result in results)
    sites = "\n".join(", ".join(f"{n} {fate}" for fate, n in sorted(graph.items())) for graph in results[0].sites)
    worst = max((error for result in results for error in result.errors), key=ratio)
    relative = worst.compiled_worst / worst.scale_worst
    table.add_row(
        name,
        sites + ("" if same else "\n[red]ranks differ"),
        f"{ratio(worst):.2f} ({relative:.1e}) {worst.name}",
        f"{max(outcomes.seconds(name)):.1f}",
    )


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--only", default="")
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "both"), default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=[3])
    given = parser.parse_args()
    dtypes = [torch.bfloat16, torch.float32] if given.dtype == "both" else [getattr(torch, given.dtype)]
    chosen = cells(given.only, dtypes, given.batch)
    cases = {name: partial(run_cell, cell=cell) for name, cell in chosen.items()}
    outcomes = run_cases(cases, given.world, timeout_s=1500)
    table = Table("cell", "sites: forward, backward", "compiled/eager error", "s")
    for name in chosen:
        _fill(table, name, outcomes)
    Console(width=220).print(table)


if __name__ == "__main__":
    main()
