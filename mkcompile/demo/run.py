"""`python -m mkcompile demo`: two models on two ranks of this machine, compared and explained."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from mkcompile.demo.models import Size
from mkcompile.demo.show import Steps, agrees, show_differences
from mkcompile.demo.work import HUGGING_FACE, MAKERS, STEPS, Job, Outcome, work
from mkcompile.errors import OptionError
from mkcompile.inspect.console import terminal
from mkcompile.inspect.ranks import Launch, RankError, run_ranks

# Of the largest element. In fp32 the order of sums is all that may differ; bf16 keeps 8 bits of each intermediate.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main(argv: Sequence[str] | None = None) -> int:
    """The demo; 0 if every result agrees with eager and with Inductor, else 1.

    Raises: OptionError for ranks that the models can't be divided among, or that there are no GPUs for.
    """
    given = _parser().parse_args(argv)
    console = terminal()
    size = Size(num_layers=given.layers)
    device = _device(given.device, given.ranks, size)
    dtype = DTYPES[given.dtype or ("bfloat16" if device == "cuda" else "float32")]
    job = Job(
        models=_models(console) if given.only is None else (given.only,),
        size=size,
        world_size=given.ranks,
        device=device,
        dtype=dtype,
        fuse=given.fuse,
        plant_error=given.plant_error,
    )
    where = "NCCL, one GPU a rank" if device == "cuda" else "gloo on the CPU; fused operators run their references"
    console.print(f"[bold]mkcompile demo[/bold]: {given.ranks} ranks, {where}, {str(dtype).removeprefix('torch.')}")
    started = time.monotonic()
    try:
        with Steps(console, given.ranks, len(job.models) * len(STEPS)) as steps:
            launch = Launch(world_size=given.ranks, device=device, timeout_s=given.timeout)
            by_rank = run_ranks(partial(work, job=job), launch, steps.step)
    except RankError as failure:
        console.print(f"[bold red]the demo failed[/bold red]: {escape(str(failure))}", soft_wrap=True)
        return 1
    _show_reports(console, by_rank[0], given.html)
    show_differences(console, by_rank, TOLERANCE[dtype])
    right = all(agrees(outcomes, TOLERANCE[dtype]) for outcomes in by_rank)
    verdict = "[bold green]all results agree[/bold green]" if right else "[bold red]results differ[/bold red]"
    console.print(f"{verdict}, {time.monotonic() - started:.0f} s")
    return 0 if right else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mkcompile demo",
        description="Compile a tensor-parallel Llama (inference) and a sequence-parallel Llama layer (training) with "
        "backend 'mkernel', say what became of every collective, and compare with eager and with Inductor.",
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine (default 2)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: bfloat16 on GPUs, float32 on the CPU")
    parser.add_argument("--layers", type=int, default=2, help="layers of the tensor-parallel Llama (default 2)")
    parser.add_argument("--only", choices=tuple(MAKERS), help="one of the two models")
    parser.add_argument("--fuse", choices=("always", "auto"), default="always", help="mkernel.fuse (default always)")
    parser.add_argument("--html", type=Path, default=Path("build/report.html"), help="where the report goes")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which the demo gives up")
    parser.add_argument("--plant-error", action="store_true", help="make fused operators wrong; the demo must notice")
    return parser


def _models(console: Console) -> tuple[str, ...]:
    """Hugging Face's; where its library is not installed, a layer in plain torch."""
    if find_spec("transformers") is not None:
        return HUGGING_FACE
    console.print("[yellow]transformers is not installed[/yellow]: one layer in plain torch instead of its two models")
    console.print("to see them too: pip install transformers accelerate", style="dim")
    return ("plain",)


def _device(asked: str, num_ranks: int, size: Size) -> str:
    heads = size.num_kv_heads
    fitting = [count for count in range(1, heads + 1) if heads % count == 0]
    if num_ranks not in fitting:
        raise OptionError(f"--ranks must divide the {heads} heads: {', '.join(map(str, fitting))}; got {num_ranks}")
    num_gpus = _usable_gpus() if asked != "cpu" else 0
    if asked == "cuda" and num_gpus < num_ranks:
        raise OptionError(f"--device cuda with {num_ranks} ranks needs as many GPUs; there are {num_gpus}")
    return ("cuda" if num_gpus >= num_ranks else "cpu") if asked == "auto" else asked


def _usable_gpus() -> int:
    """GPUs that reach each other's memory, counted from the first."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    reached = [all(torch.cuda.can_device_access_peer(i, j) for i in range(j)) for j in range(count)]
    return reached.index(False) if False in reached else count


def _show_reports(console: Console, outcomes: Sequence[Outcome], html: Path) -> None:
    """Rank 0's reports on the terminal and as pages; the first model's at `html`, the others' beside it."""
    pages: list[Path] = []
    for i, outcome in enumerate(outcomes):
        assert outcome.report is not None
        console.rule(escape(outcome.name), align="left")
        outcome.report.print(console)
        path = html if i == 0 else html.with_stem(f"{html.stem}-{i + 1}")
        path.parent.mkdir(parents=True, exist_ok=True)
        pages.append(outcome.report.to_html(path))
    console.rule("results", align="left")
    for outcome, page in zip(outcomes, pages, strict=True):
        console.print(f"report on {escape(outcome.name)}: {escape(str(page))}", soft_wrap=True)
