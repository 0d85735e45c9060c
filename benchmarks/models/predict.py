"""What `explain` predicts for each cell's step, as it is and fused: to stand beside the measurement.

The ranks are not there, and weights of blocks are on the meta device, those of whole models in this process: it runs
beside the measuring pairs, on processors only; or by itself, of all cells and with the constants of two H200:
python -m benchmarks.models.predict [OUT.jsonl]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from mkcompile.inspect.explain import Request, explain_request
from mkcompile.inspect.offline import fake_world
from mkcompile.inspect.report import Report

from .blocks import parallel_stack
from .cells import MODELS, MODES, Cell, Selection
from .huggingface import inference


def request_of(cell: Cell, world_size: int, topology: str, train: bool) -> Request:
    """The cell's blocks or whole model; needs a process group, real or fake, of that many ranks."""
    mesh = init_device_mesh("cpu", (world_size,))
    options = {"mkernel.topology": topology}
    if not cell.trains:
        whole, ids = inference(cell.model, cell.batch, cell.tokens, mesh, torch.bfloat16)
        return Request(model=whole, args=(ids,), options=options, backward=False)
    module: nn.Module = parallel_stack(MODELS[cell.model], cell.form, mesh, torch.bfloat16).requires_grad_(train)
    length = cell.tokens // (world_size if cell.form == "sequence" else 1)
    shape = (cell.batch, length, MODELS[cell.model].hidden)
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=train)
    return Request(model=module, args=(x,), options=options, backward=train)


def prediction_of(cell: Cell, reports: dict[str, Report]) -> dict[str, Any]:
    """One row. Units: milliseconds of a step."""
    row: dict[str, Any] = {"model": cell.model, "form": cell.form, "B": cell.batch, "T": cell.tokens}
    for which, report in reports.items():
        totals = report.totals
        row |= {f"{which}_unfused_ms": round(totals.step_unfused_s * 1e3, 4)}
        row |= {f"{which}_fused_ms": round(totals.step_fused_s * 1e3, 4)}
        row |= {f"{which}_collectives": int(totals.collectives), f"{which}_fused": int(totals.fused)}
        row[f"{which}_left"] = sorted({one.why for one in report.refused()})
    return row


def predict(cells: Sequence[Cell], world_size: int, topology: str, out: Path) -> None:
    """A row for each model, form and size; both modes share it."""
    distinct = {(cell.model, cell.form, cell.batch, cell.tokens): cell for cell in cells}
    for cell in distinct.values():
        passes = ("fwd", "fwdbwd") if cell.trains else ("fwd",)
        with fake_world(world_size), nullcontext() if cell.trains else torch.no_grad():
            reports = {
                which: explain_request(request_of(cell, world_size, topology, train=which == "fwdbwd"))
                for which in passes
            }
            row = prediction_of(cell, reports) | {"topology": reports["fwd"].topology}
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def main(argv: Sequence[str]) -> None:
    """The file is written anew."""
    out = Path(argv[0] if argv else "benchmarks/results/2xh200/models-predicted.jsonl")
    out.unlink(missing_ok=True)
    predict(Selection(modes=MODES[:1]).cells("cuda"), 2, "2xh200", out)


if __name__ == "__main__":
    main(sys.argv[1:])
