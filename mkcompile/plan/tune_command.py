"""`python -m mkcompile tune`: measures candidates and keeps the best on disk.

Under torchrun its ranks are those of torchrun; alone it starts ranks of its own on this machine. Without GPUs it times
the operators' reference on CPU tensors over gloo.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch._C._distributed_c10d import TCPStore

from mkcompile.errors import MkcompileError
from mkcompile.ops.problem import Problem
from mkcompile.plan.buckets import at_bucket, entry_name
from mkcompile.plan.decide import Policy
from mkcompile.plan.disk import Results, results_path
from mkcompile.plan.exchange import Ranks
from mkcompile.plan.reference import Maker, ReferenceMeasurer
from mkcompile.plan.simulate.sweep import parse_site
from mkcompile.plan.topology import PRESETS, Topology
from mkcompile.plan.tune import Measurer, Request, tune
from mkcompile.plan.tune_sweep import write_sweep

_FAILED, _ALL = 1, 10_000
_HOST = "127.0.0.1"
_DEFAULT_SITES = ("gemm_all_reduce:64x256x128", "gemm_reduce_scatter:64x256x128", "all_gather_gemm:64x256x128")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What to measure with: the machine, how a candidate is timed, which kernels there are, and the ranks."""

    topology: Topology
    measurer: Measurer
    ranks: Ranks
    policy: Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """`make_bench` makes a bench in a process whose default group is initialised with `backend`."""

    backend: str
    make_bench: Callable[[], Bench]


def cpu_bench() -> Bench:
    """Times references over the default group."""
    group = dist.group.WORLD
    assert group is not None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    return Bench(
        topology=PRESETS["cpu"],
        measurer=ReferenceMeasurer(maker=Maker(group=group.group_name, seed=rank)),
        ranks=Ranks(rank=rank, world_size=world_size, store=store, name="mkcompile/tune"),
        policy=Policy(),
    )


CPU = Where(backend="gloo", make_bench=cpu_bench)


def main(arguments: Sequence[str]) -> int:
    """The command on CPU tensors; its exit status."""
    options = parser().parse_args(list(arguments))
    try:
        return run(options, problems_of(options), CPU)
    except MkcompileError as error:
        Console(stderr=True).print(str(error), style="red", markup=False)
        return 2


def problems_of(options: argparse.Namespace) -> list[Problem]:
    """What the command names. Raises: OptionError."""
    return [parse_site(site, options.ranks) for site in options.site or ()]


def run(options: argparse.Namespace, problems: Sequence[Problem], where: Where) -> int:
    """Tune these problems, or a few small ones; the exit status. `where` is asked in every rank."""
    options.problems = list(problems) or [parse_site(site, options.ranks) for site in _DEFAULT_SITES]
    if dist.is_torchelastic_launched():
        dist.init_process_group(where.backend)
        return run_in_rank(options, where.make_bench)
    return _spawn(options, where)


def _spawn(options: argparse.Namespace, where: Where) -> int:
    """Ranks of our own; the first one that fails, or the deadline, ends all of them."""
    context = multiprocessing.get_context("spawn")
    # ranks speak to each other a thousand times: files are too slow for that
    meeting = TCPStore(_HOST, 0, options.ranks, is_master=True, wait_for_workers=False)
    arguments = [(rank, options, where, meeting.port) for rank in range(options.ranks)]
    processes = [context.Process(target=_rank_main, args=each, daemon=True) for each in arguments]
    for process in processes:
        process.start()
    deadline = time.monotonic() + options.timeout
    try:
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            for process in processes:
                process.join(0.1)
            if any(process.exitcode not in (None, 0) for process in processes):
                deadline = min(deadline, time.monotonic() + 10.0)
        late = [str(rank) for rank, process in enumerate(processes) if process.exitcode is None]
        if late:
            Console(stderr=True).print(
                f"ranks {', '.join(late)} were not done within {options.timeout:g} s; what was measured is kept, "
                "and the same command goes on from there",
                style="red",
            )
        return _FAILED if any(process.exitcode != 0 for process in processes) else 0
    finally:
        for process in processes:
            process.kill()


def _rank_main(rank: int, options: argparse.Namespace, where: Where, port: int) -> None:
    timeout = timedelta(seconds=min(options.timeout, 300.0))
    store = TCPStore(_HOST, port, options.ranks, is_master=False, timeout=timeout)
    dist.init_process_group(where.backend, store=store, rank=rank, world_size=options.ranks, timeout=timeout)
    sys.exit(run_in_rank(options, where.make_bench))


def run_in_rank(options: argparse.Namespace, make_bench: Callable[[], Bench]) -> int:
    """Tune on this rank; rank 0 shows what happens."""
    try:
        bench = make_bench()
        request = Request(
            problems=options.problems,
            topology=bench.topology,
            policy=bench.policy,
            limit=_ALL if options.sweep else options.limit,
            rounds=options.rounds,
            folder=options.folder,
        )
        results = (
            _with_progress(request, bench) if bench.ranks.rank == 0 else tune(request, bench.measurer, bench.ranks)
        )
        if bench.ranks.rank == 0:
            console = Console()
            console.print(results_table(request.problems, results))
            console.print(f"kept in {results_path(bench.topology, options.folder)}", markup=False)
            if options.sweep:
                write_sweep(options.sweep, request, results)
        return 0
    except MkcompileError as error:
        Console(stderr=True).print(str(error), style="red", markup=False)
        return _FAILED
    finally:
        dist.destroy_process_group()


def _with_progress(request: Request, bench: Bench) -> Results:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        shown = bar.add_task("tuning", total=None)

        def progress(done: int, total: int, what: str) -> None:
            bar.update(shown, completed=done, total=total, description=what or "done")

        return tune(request, bench.measurer, bench.ranks, progress)


def results_table(problems: Sequence[Problem], results: Results) -> Table:
    """All candidates, the best of each bucket marked. Microseconds."""
    table = Table(title="Measured candidates (microseconds, slowest rank)")
    table.add_column("bucket")
    table.add_column("candidate")
    table.add_column("time", justify="right")
    for problem in problems:
        bound = at_bucket(problem, problem.m)
        best = results.best(entry_name(problem))
        for one in results.entries.get(entry_name(problem), {}).values():
            time_text = one.error if one.seconds is None else f"{one.seconds * 1e6:.1f}"
            mark = " *" if best is not None and one.plan == best.plan else ""
            size = f"{problem.operator} m<={bound.m} n={bound.n} k={bound.k}"
            table.add_row(size, one.plan.name.removeprefix(f"{problem.operator}/") + mark, time_text)
    return table


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = argparse.ArgumentParser(prog="python -m mkcompile tune", description=__doc__, add_help=False)
    add = made.add_argument
    add("--site", action="append", metavar="OPERATOR:MxNxK", help="what to tune; several times for several")
    add("--ranks", type=int, default=2, help="ranks to start where there is no torchrun")
    add("--limit", type=int, default=6, help="candidates of each site, the best predicted ones first")
    add("--rounds", type=int, default=7, help="how often each candidate is timed, in turn with the others")
    add(
        "--sweep", type=Path, metavar="FILE", help="measure all candidates, and append every time to FILE as JSON lines"
    )
    add("--folder", type=Path, help="where results are kept (default: the cache folder)")
    add("--timeout", type=float, default=1800.0, help="seconds until everything is ended")
    return made
