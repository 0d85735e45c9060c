"""`trace`: what the blocks of fused kernels do when, as a file for Perfetto and as a picture."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from mkcompile.errors import OptionError, UnsupportedDeviceError

if TYPE_CHECKING:
    from mkcompile.inspect.trace.run import Work
    from mkcompile.runtime.trace.file import Timeline

DESCRIPTION = """\
Runs MODULE:FUNCTION (as `explain` takes it), compiled, or one operator, on one GPU a rank with traced kernels, and
writes a file that https://ui.perfetto.dev opens and a picture. Under torchrun it uses the ranks that there are.

  python -m mkcompile trace --op gemm_all_reduce --shape 4096,8192,3584 --png trace.png
  python -m mkcompile trace --from trace.json --png trace.png
"""
_OPERATORS = ("gemm_all_reduce", "gemm_reduce_scatter", "all_gather_gemm")
_TIMEOUT_S = 600.0


def add(commands: Any) -> None:
    """Register the command."""
    one = commands.add_parser(
        "trace",
        help="what the blocks of fused kernels do when, for Perfetto and as a picture",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    one.add_argument("target", metavar="MODULE:FUNCTION", nargs="?", default="")
    one.add_argument("--op", choices=_OPERATORS, help="trace one operator instead")
    one.add_argument(
        "--shape", metavar="M,N,K", help="its size: rows (of one rank for all_gather_gemm), columns, inner"
    )
    one.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an argument for FUNCTION")
    one.add_argument("--backward", action="store_true", help="with the backward pass of the sum of the result")
    one.add_argument("--steps", type=int, default=1, metavar="N", help="how often it runs while it is recorded")
    one.add_argument("--world", type=int, default=0, metavar="N", help="ranks to start; default: one for each GPU")
    one.add_argument("--out", type=Path, default=Path("trace.json"), metavar="FILE", help=".json or .json.gz")
    one.add_argument("--png", type=Path, metavar="FILE", help="draw it, too")
    one.add_argument("--from", dest="source", type=Path, metavar="FILE", help="run nothing: read a recorded timeline")
    one.set_defaults(run=run, passes_rest=False)


def run(arguments: argparse.Namespace) -> int:
    """Record or read, then show."""
    from mkcompile.runtime.trace import file

    console = Console()
    if arguments.source is not None:
        timeline = file.read(arguments.source)
    else:
        recorded = _record(_work(arguments), arguments.world, console)
        if recorded is None:  # another rank of torchrun writes
            return 0
        timeline = recorded
        file.write(timeline, arguments.out)
        console.print(f"wrote {arguments.out}: open it at https://ui.perfetto.dev")
    _print(timeline, console)
    if arguments.png is not None:
        from mkcompile.inspect.trace.picture import draw

        draw(timeline, arguments.png, _title(timeline))
        console.print(f"wrote {arguments.png}")
    return 0


def _work(arguments: argparse.Namespace) -> Work:
    from mkcompile.inspect.commands.explain import pairs
    from mkcompile.inspect.trace.run import Work

    if bool(arguments.target) == bool(arguments.op):
        raise OptionError("give either MODULE:FUNCTION or --op (or --from FILE)")
    if arguments.op and not arguments.shape:
        raise OptionError("--op needs --shape M,N,K")
    if arguments.steps < 1:
        raise OptionError(f"--steps must be at least 1, got {arguments.steps}")
    return Work(
        target=arguments.target,
        given=pairs(arguments.set),
        forward_only=not arguments.backward,
        operator=arguments.op or "",
        size=_size(arguments.shape) if arguments.op else (0, 0, 0),
        steps=arguments.steps,
    )


def _size(text: str) -> tuple[int, int, int]:
    try:
        m, n, k = (int(part) for part in text.split(","))
    except ValueError as error:
        raise OptionError(f"--shape must be three numbers M,N,K, got {text!r}") from error
    return m, n, k


def _record(work: Work, world: int, console: Console) -> Timeline | None:
    """Raises: UnsupportedDeviceError where there are too few GPUs."""
    import torch

    from mkcompile.inspect.ranks import Launch, RankError, run_ranks
    from mkcompile.inspect.trace.run import traced
    from mkcompile.runtime.trace.file import Timeline

    if torch.distributed.is_torchelastic_launched():
        return _record_here(work, console)
    world = world or torch.cuda.device_count()
    if torch.cuda.device_count() < max(world, 2):
        raise UnsupportedDeviceError(
            "tracing runs kernels: it needs at least two CUDA GPUs (compute capability 9.0) that reach each other, and "
            f"{torch.cuda.device_count()} of {max(world, 2)} are here. A timeline that was recorded elsewhere is shown "
            "with --from FILE"
        )
    with console.status("starting the ranks") as status:
        launch = Launch(world_size=world, device="cuda", timeout_s=_TIMEOUT_S)
        try:
            found = run_ranks(partial(traced, work), launch, lambda rank, text: status.update(f"rank {rank}: {text}"))
        except RankError as error:
            raise OptionError(str(error)) from error
    return Timeline.of([trace for of_rank in found for trace in of_rank])


def _record_here(work: Work, console: Console) -> Timeline | None:
    """As one of torchrun's ranks; the first returns what all recorded."""
    import torch
    import torch.distributed as dist

    from mkcompile.inspect.trace.run import traced
    from mkcompile.runtime.trace.file import Timeline

    local = dist.get_node_local_rank(fallback_rank=0)
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    rank = dist.get_rank()
    mine = traced(work, rank, lambda text: console.print(f"rank {rank}: {text}") if rank == 0 else None)
    found: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object(mine, found)
    dist.destroy_process_group()
    return None if found is None else Timeline.of([trace for of_rank in found for trace in of_rank])


def _print(timeline: Timeline, console: Console) -> None:
    from mkcompile.runtime.trace import summary

    table = Table(title="synthetic, not measured" if timeline.synthetic else None)
    for name in ("rank", "launch", "epoch", "blocks", "us", "exposed us", "math at work", "math waits us"):
        table.add_column(name, justify="left" if name == "launch" else "right")
    for one in summary(timeline.traces):
        table.add_row(
            str(one.rank), one.launch.split(" on ")[0], str(one.epoch), str(one.num_blocks), f"{one.span_us:.1f}",
            f"{one.exposed_us:.1f}", f"{one.busy_share:.0%}", f"{one.compute_wait_us:.1f}",
        )  # fmt: skip
    if not table.rows:
        console.print("nothing was recorded: no fused kernel ran; `python -m mkcompile explain` says why")
        return
    console.print(table)
    for trace, clock in zip(timeline.traces, timeline.clocks, strict=True):
        exact = "not aligned" if clock.within_ns is None else f"aligned to {clock.within_ns / 1000:.2f} us"
        lost = f", {trace.overwritten} records overwritten" if trace.overwritten else ""
        console.print(f"rank {trace.rank}: {len(trace.tasks)} records{lost}, clock {exact}")


def _title(timeline: Timeline) -> str:
    names = {launch.split(" on ", 1)[0] for trace in timeline.traces for launch in trace.launches}
    return names.pop() if len(names) == 1 else f"{len(names)} kinds of launches"
