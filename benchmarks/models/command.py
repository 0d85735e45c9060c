"""`python -m mkcompile bench models`: every model, form, size and mode, all contenders, one JSON line each.

Pairs of processes compile side by side and take turns on two GPUs; a machine with more has several such lanes. A row
that is in the results already is not measured again unless --again is given, so that a run may be stopped and resumed.
"""

from __future__ import annotations

import argparse
import datetime
import math
import multiprocessing
import multiprocessing.process
import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from mkcompile.inspect.ranks import Launch, RankError, run_ranks

from . import results
from .cells import CONTENDERS, FORMS, MODELS, MODES, VARIANT, WHOLE, Cell, Selection, units_of
from .plan import Plan
from .predict import predict
from .progress import Progress
from .worker import Job, work

WORLD_SIZE = 2
#: `shared`: both ranks on one GPU, by turns: for checks, and no measure of any step's time.
DEVICES = ("cpu", "cuda", "shared")
_REHEARSED = Path("build/models.jsonl")
_RESULTS = {"cuda": Path("benchmarks/results/2xh200/models.jsonl"), "cpu": _REHEARSED, "shared": _REHEARSED}


def main(argv: Sequence[str]) -> int:
    """The exit status: 1 where a row of ours has an error or is missing."""
    given = _parser().parse_args(argv)
    device = _device(given.device)
    given.out = given.out or _RESULTS[device]
    if given.compiles_only:
        given.compile_times = given.compile_times or ""
        given.out = given.out.with_name(given.out.stem + "-compile.jsonl")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    selection = Selection(
        models=tuple(given.model), forms=tuple(given.form), tokens=tuple(given.tokens), modes=tuple(given.mode)
    )
    wanted = (*(given.contender or CONTENDERS), *((VARIANT,) if given.variant else ()))
    found = {} if given.again else results.read(given.out)
    every = in_order(selection.cells(device), given.select)
    cells = [cell for cell in every if not results.is_done(cell, cell.contenders(wanted, device), found)]
    console = Console(stderr=True)
    console.print(f"{len(cells)} of {len(every)} cells to measure, {device}, into {given.out}")
    if device == "cpu":
        console.print("measuring needs two CUDA GPUs; this tries the smallest model on the CPU")
    if not cells:
        return 0
    plan = Plan(
        contenders=wanted, device=device, budget_s=given.row_s, train=not given.forward_only,
        compile_times=given.compile_times, profile=given.profile, quiet=given.quiet,
        compiles_only=given.compiles_only, checks_only=given.checks_only, together=given.together,
        options=dict(given.option), variant=dict(given.variant),
    )  # fmt: skip
    lanes = torch.cuda.device_count() // WORLD_SIZE if device == "cuda" else 1
    units = units_of(cells, given.together)
    num_pairs = -(-len(units) // lanes) if given.quiet else given.pairs
    _share_processors(lanes * num_pairs)
    with tempfile.TemporaryDirectory(prefix="mkcompile-models-") as folder:
        job = Job(
            units=units, plan=plan, folder=Path(folder), caches=given.caches or Path(folder) / "caches",
            out=given.out, common=_common(given.commit, device), deadline=time.time() + given.limit_s,
            cell_s=given.cell_s, lock=given.lock,
        )  # fmt: skip
        started, predictor = time.time(), start_predictor(job) if given.predict else None
        if lanes == 1:
            with Progress(console, job.num_cells) as progress:
                run(job, num_pairs, progress)
        else:
            run_lanes(job, num_pairs, lanes)
        if predictor is not None:
            end_predictor(predictor, job)
        console.print(not_begun(job, lanes * num_pairs, time.time() - started), markup=False, end="")
    return report_errors(console, every, wanted, device, given.out)


def in_order(cells: Sequence[Cell], patterns: Sequence[str]) -> list[Cell]:
    """Cells whose name matches a pattern, by the first that they match; all of them where there are no patterns."""
    first = {cell: next((i for i, one in enumerate(patterns) if re.search(one, str(cell))), -1) for cell in cells}
    chosen = [cell for cell in cells if first[cell] >= 0 or not patterns]
    return sorted(chosen, key=lambda cell: first[cell])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mkcompile bench models", description=__doc__)
    parser.add_argument("--model", choices=(*MODELS, *WHOLE), action="append", default=[], help="may be repeated")
    parser.add_argument("--form", choices=FORMS, action="append", default=[], help="may be repeated")
    parser.add_argument("--tokens", type=_tokens, action="append", default=[], metavar="BxT", help="may be repeated")
    parser.add_argument("--mode", choices=MODES, action="append", default=[], help="may be repeated")
    matching = "only cells whose name matches; may be repeated: cells come in the order of the patterns"
    parser.add_argument("--select", action="append", default=[], metavar="REGEX", help=matching)
    parser.add_argument("--contender", choices=CONTENDERS, action="append", default=[], help="may be repeated")
    parser.add_argument("--device", choices=("auto", *DEVICES), default="auto")
    parser.add_argument("--forward-only", action="store_true", help="leave backward out")
    checked = "values, gradients and 20 training steps of every cell, and no times"
    parser.add_argument("--checks-only", action="store_true", help=checked)
    compiled = "caches for each contender, what it takes to compile cold, and from them; of cells whose name matches"
    parser.add_argument("--compile-times", nargs="?", const="", metavar="REGEX", help=compiled)
    parser.add_argument("--compiles-only", action="store_true", help="the same, and nothing else is measured")
    parser.add_argument("--option", type=_option, action="append", default=[], metavar="NAME=VALUE", help="of ours")
    beside = "of ours once more, in turn with ours"
    parser.add_argument("--variant", type=_option, action="append", default=[], metavar="NAME=VALUE", help=beside)
    profiled = "what a step exposes, by torch's profiler and our kernels' timelines; of cells whose name matches"
    parser.add_argument("--profile", nargs="?", const="", metavar="REGEX", help=profiled)
    parser.add_argument("--predict", action="store_true", help="what explain predicts for each row, computed beside")
    parser.add_argument("--again", action="store_true", help="measure also what is in the results")
    parser.add_argument("--pairs", type=int, default=4, help="pairs of processes that share two GPUs")
    parser.add_argument("--together", action="store_true", help="compile once for both modes where both are measured")
    parser.add_argument(
        "--lock", type=Path, help="a file that is locked by whoever uses the GPUs, by other programs too"
    )
    parser.add_argument("--quiet", action="store_true", help="as many pairs as cells; none compiles while one times")
    parser.add_argument("--row-s", type=float, default=2.5, help="seconds of timing for each pass of a cell")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="begin no cell that would end later")
    parser.add_argument("--cell-s", type=float, default=45.0, help="what a cell is expected to take, with compiling")
    parser.add_argument("--caches", type=Path, help="a folder for compiled kernels, which later runs may share")
    parser.add_argument("--commit", default="", help="written into every row; default: git's")
    parser.add_argument(
        "--out", type=Path, help=f"rows are appended; default {_RESULTS['cuda']}, without GPUs in build"
    )
    return parser


def _tokens(text: str) -> tuple[int, int]:
    batch, _, length = text.partition("x")
    return int(batch), int(length)


def _option(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def _device(asked: str) -> str:
    if asked != "auto":
        return asked
    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= WORLD_SIZE else "cpu"


def _share_processors(pairs: int) -> None:
    """Inductor starts as many compile workers as there are processors, in every rank."""
    each = max(2, (os.cpu_count() or 1) // (pairs * WORLD_SIZE))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(each, 8)))


def _common(commit: str, device: str) -> dict[str, Any]:
    gpu = "cpu" if device == "cpu" else torch.cuda.get_device_name()
    gpu = f"1 x {gpu}, two ranks by turns" if device == "shared" else gpu
    return {
        "world": WORLD_SIZE, "dtype": "bfloat16", "device": gpu, "torch": torch.__version__,
        "commit": commit or _git_commit(), "date": datetime.date.today().isoformat(),
    }  # fmt: skip


def _git_commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return done.stdout.strip() or "unknown"


@dataclass(slots=True, kw_only=True)
class _Pair:
    """One pair of processes, restarted behind a unit that ended it. `unit`: the number of the one it is at."""

    job: Job
    number: int
    progress: Progress
    unit: int | None = field(default=None)

    def run(self) -> None:
        while (left_s := self.job.deadline - time.time()) > 0:
            self.unit = None
            launch = Launch(world_size=WORLD_SIZE, device=self.job.plan.device, timeout_s=left_s, group_timeout_s=90.0)
            try:
                run_ranks(partial(work, job=self.job), launch, self._heard)
                return
            except RankError as failure:
                self._record(str(failure))

    def _heard(self, rank: int, text: str) -> None:
        what, _, number = text.partition(" ")
        if what not in ("begun", "done"):
            self.progress.step(self.number, rank, text)
        elif rank == 0:
            self.unit = int(number) if what == "begun" else None
            if what == "done":
                self.progress.advance(len(self.job.units[int(number)]))

    def _record(self, failure: str) -> None:
        """The cells that were being measured get rows that say what ended them, unless only time ran out."""
        self.progress.say(failure)
        if self.unit is None or failure.startswith("out of time"):
            return
        unit, plan = self.job.units[self.unit], self.job.plan
        found = results.read(self.job.out)
        for cell in unit:
            contenders = cell.contenders(plan.contenders, plan.device)
            if len(unit) > 1 and results.is_done(cell, contenders, found):
                continue  # the mode that was measured first
            rows = results.with_error(cell, contenders, " ".join(failure.split())[-400:], found)
            results.append(self.job.out, [{**row, **self.job.common} for row in rows])
        self.progress.advance(len(unit))


def run(job: Job, num_pairs: int, progress: Progress) -> None:
    """Start the pairs of one lane, and wait for all of them."""
    first = job.lane * num_pairs
    pairs = [_Pair(job=job, number=first + i, progress=progress) for i in range(min(num_pairs, len(job.units)))]
    threads = [threading.Thread(target=pair.run) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run_lanes(job: Job, num_pairs: int, lanes: int) -> None:
    """A process for each two GPUs, which sees no others: nothing is shared among lanes but the processors."""
    context = multiprocessing.get_context("spawn")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = visible.split(",") if visible else [str(i) for i in range(WORLD_SIZE * lanes)]
    processes = []
    for lane in range(lanes):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[WORLD_SIZE * lane : WORLD_SIZE * (lane + 1)])
        process = context.Process(target=_lane, args=(replace(job, lane=lane), num_pairs))
        process.start()
        processes.append(process)
    for process in processes:
        process.join()


def _lane(job: Job, num_pairs: int) -> None:
    with Progress(Console(stderr=True, force_terminal=False), job.num_cells) as progress:
        run(job, num_pairs, progress)


def start_predictor(job: Job) -> multiprocessing.process.BaseProcess:
    """A process of its own; its rows lie beside the results."""
    out = job.out.with_name(job.out.stem + "-predicted.jsonl")
    context = multiprocessing.get_context("spawn")
    process = context.Process(
        target=predict, args=([cell for unit in job.units for cell in unit], WORLD_SIZE, "probe", out), daemon=True
    )
    process.start()
    return process


def end_predictor(process: multiprocessing.process.BaseProcess, job: Job) -> None:
    """It is given what is left of the time; a row more or less is no loss."""
    process.join(timeout=max(0.0, job.deadline - time.time()))
    process.kill()
    process.join()


def not_begun(job: Job, num_pairs: int, spent_s: float) -> str:
    """What the time did not suffice for, and how much would; nothing where every cell was begun."""
    num_left = len(job.units) - job.queue.next()
    if num_left <= 0:
        return ""
    needed_s = spent_s + math.ceil(num_left / num_pairs) * job.cell_s
    what = f"{num_left} of {len(job.units)} (cells, or both modes of one)"
    return f"{what} were not begun: no cell begins within {job.cell_s:.0f} s of the end (--cell-s). " + (
        f"They need about --limit-s {needed_s:.0f}\n"
    )


def report_errors(console: Console, cells: list[Cell], wanted: tuple[str, ...], device: str, out: Path) -> int:
    """Say which rows have errors or are missing; 1 where one of ours has or is."""
    found = results.read(out)
    keys = [(cell.key, name) for cell in cells for name in cell.contenders(wanted, device)]
    for key in keys:
        error = found[key].get("error") if key in found else "not measured yet"
        if error:
            console.print(f"{' '.join(str(part) for part in key[0])}, {key[1]}: {error}", markup=False)
    ours = [found.get(key, {"error": "missing"}) for key in keys if key[1] == "mkernel"]
    return 1 if any("error" in row for row in ours) else 0
