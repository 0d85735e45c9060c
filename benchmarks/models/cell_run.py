"""One cell on one rank: compile every contender, check it, time all of them in turn, and look where the time goes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor.cudagraph_trees import reset_cudagraph_trees
from torch.distributed.device_mesh import DeviceMesh

from mkcompile.runtime import trace, wiring

from . import correct
from .blocks import Workload, workload
from .cells import LOSS_ROWS, TRUTH_ROWS, Cell
from .contenders import Call, Contender
from .overlap import overlap_in, record
from .timing import Step, interleaved, synchronize
from .tracer import Tracer
from .turn import Turn

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How cells are measured. Units: `budget_s` seconds of rounds for each pass of a cell.

    `train`: measure forward with backward, too. `compile_times`: every contender has caches of its own, is compiled a
    second time from them, and nothing else is timed; else all share what Triton has compiled. `profile`: look at one
    step of each contender with torch's profiler, and of ours with kernels that write their timelines. `quiet`: no pair
    compiles while another one times, so that every pair should have one cell only. `timeline`: kernels write their
    timelines from the start, also into CUDA graphs; nothing is timed. `options`: of our backend.
    """

    contenders: tuple[str, ...]
    device: str
    budget_s: float
    train: bool
    compile_times: bool
    profile: bool
    quiet: bool
    timeline: bool = False
    options: dict[str, str] = field(default_factory=dict)

    @property
    def times(self) -> bool:
        """Is a step timed?"""
        return not self.timeline and not self.compile_times


@dataclass(slots=True)
class Entry:
    """A contender with what became of it."""

    contender: Contender
    call: Call
    row: Row = field(default_factory=dict)

    @property
    def works(self) -> bool:
        """Has it come this far without an error, and been right?"""
        return "error" not in self.row


@dataclass(slots=True, kw_only=True)
class CellRun:
    """The state of one cell on this rank."""

    cell: Cell
    plan: Plan
    turn: Turn
    load: Workload
    say: Callable[[str], None]
    publish: Callable[[list[Row]], None]
    tracer: Tracer
    entries: dict[str, Entry] = field(default_factory=dict)

    @property
    def working(self) -> dict[str, Entry]:
        """Entries that are still in the race."""
        return {name: entry for name, entry in self.entries.items() if entry.works}

    @property
    def passes(self) -> tuple[str, ...]:
        """Names of what is measured, as in the rows."""
        return ("fwd", "fwdbwd") if self.plan.train and self.load.trains else ("fwd",)

    @contextmanager
    def step(self, name: str, what: str) -> Iterator[None]:
        """Whatever a contender raises, on any rank, becomes its row's error; all ranks come out of here together."""
        entry = self.entries[name]
        self.say(f"{self.cell}: {what} {name}")
        failed = 0
        try:
            yield
        except Exception as error:  # a row with its error is a result
            failed = 1
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            entry.row.setdefault("error", f"{what}: {text[:400]}")
        self.turn.leave()
        others = torch.tensor(failed)
        dist.all_reduce(others, dist.ReduceOp.MAX, group=self.turn.host_group)
        if others.item() and not failed:
            entry.row.setdefault("error", f"{what}: on another rank")

    def compile(self, name: str, kind: str, passes: tuple[str, ...]) -> None:
        """Each pass at its first call. Seconds leave out the wait for other pairs' turns."""
        entry = self.entries[name]
        skipped = counters["inductor"]["cudagraph_skips"]
        with entry.contender.compiling():
            for which in passes if entry.works else ():
                with self.step(name, f"compiling {which} of"):
                    started, waited = time.perf_counter(), self.turn.waited_s
                    if name == "eager":
                        self.turn.enter()
                    correct.values_of(self.load, entry.call, train=which == "fwdbwd")
                    seconds = time.perf_counter() - started - (self.turn.waited_s - waited)
                    if self.plan.compile_times:
                        entry.row[f"compile_{kind}_{which}_s"] = round(seconds, 2)
                if self.cell.graphs and entry.works:
                    self.capture(name, which)
        if self.cell.graphs:
            skips = counters["inductor"]["cudagraph_skips"] - skipped
            entry.row["cudagraph_skips"] = entry.row.get("cudagraph_skips", 0) + skips
        if self.cell.graphs and not entry.works:
            forget_compiled()  # what it left in the pool of the CUDA graphs would fail the others, too

    def capture(self, name: str, which: str) -> None:
        """The calls in which CUDA graphs are warmed up and recorded."""
        with self.step(name, f"capturing {which} of"):
            self.turn.enter()
            for _ in range(2):
                correct.values_of(self.load, self.entries[name].call, train=which == "fwdbwd")

    def check(self, which: str) -> None:
        """One pass against eager, and against the truth in fp32 where that is small enough."""
        train = which == "fwdbwd"
        self.turn.enter()
        wanted = correct.values_of(self.load, self.load.module, train)
        truth, of_eager = wanted, None
        if self.load.trains and self.cell.rows <= TRUTH_ROWS:
            exact = correct.in_fp32(self.load)
            truth = correct.values_of(exact, exact.module, train)
            of_eager = correct.distances(wanted, truth, self.turn.host_group)
        self.turn.leave()
        for name, entry in self.working.items():
            with self.step(name, f"checking {which} of"):
                self.turn.enter()
                got = correct.values_of(self.load, entry.call, train)
                errors = correct.distances(got, truth, self.turn.host_group)
                wrong = correct.too_far(errors, of_eager)
                if wrong:
                    entry.row.setdefault("error", f"wrong result: {wrong}")
                worst = max(errors, key=lambda key: errors[key])
                entry.row |= {"checked": entry.works, "judged_by": "eager" if of_eager is None else "fp32"}
                entry.row |= {"worst_error": errors[worst], "worst_tensor": worst}

    def losses(self) -> None:
        """20 training steps of each contender, from the same weights."""
        wanted: list[float] = []
        for name in ("eager", *(one for one in self.working if one != "eager")):
            call = self.load.module if name == "eager" else self.entries[name].call
            if name not in self.entries:
                self.turn.enter()
                wanted = correct.loss_curve(self.load, call, synchronize)
                self.turn.leave()
                continue
            with self.step(name, "training with"):
                self.turn.enter()
                curve = correct.loss_curve(self.load, call, synchronize)
                wanted = wanted or curve
                distance = correct.curve_distance(curve, wanted, self.turn.host_group)
                self.entries[name].row |= {"losses": curve, "losses_from_eager": round(distance, 6)}
                if not distance <= correct.CURVES_APART:
                    self.entries[name].row.setdefault("error", f"losses are {distance:.2e} of the first off")

    def steps(self, which: str) -> dict[str, Step]:
        """What is timed of each contender."""
        return {name: partial(_step, self.load, entry.call, which) for name, entry in self.working.items()}

    def time(self, which: str) -> None:
        """Median, p10, p90, tokens a second and peak memory."""
        self.say(f"{self.cell}: timing {which}")
        self.turn.enter()
        spreads = interleaved(self.steps(which), self.plan.budget_s, self.turn.host_group)
        for name, spread in spreads.items():
            row = self.entries[name].row
            row[f"{which}_ms"] = round(spread.median, 4)
            row |= {f"{which}_p10_ms": round(spread.p10, 4), f"{which}_p90_ms": round(spread.p90, 4)}
            row[f"{which}_tokens_per_s"] = round(self.cell.rows / spread.median * 1e3)
            row[f"{which}_peak_bytes"] = self._peak_bytes(self.steps(which)[name])
        self.turn.leave()
        for name in self.working:
            with self.step(name, f"after timing {which} of"):
                wiring.check()  # a launch that gave up was fast

    def _peak_bytes(self, step: Step) -> int | None:
        """Of torch's allocator during one step, this rank's, and the symmetric memory that our operators hold."""
        if not torch.cuda.is_available():
            return None
        synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        synchronize()
        return torch.cuda.max_memory_allocated()

    def look(self, which: str) -> None:
        """One step of each compiled contender under the profiler, and of ours with kernels that write timelines."""
        for name, step in self.steps(which).items():
            if name == "eager":
                continue
            with self.step(name, f"profiling {which} of"):
                self.turn.enter()
                profile = record(step)
                launches = self._traced(step) if name == "mkernel" else []
                self.turn.leave()
                seen = overlap_in(profile)
                row = self.entries[name].row
                row[f"{which}_profile"] = {**asdict(seen), "launches": [asdict(one) for one in launches]}
                inside_us = sum(one.exposed_us for one in launches)
                # what our kernels expose is inside of them: only a timeline of theirs can tell
                told = launches or not seen.fused_us
                row[f"{which}_exposed_us"] = round(seen.exposed_us + inside_us, 1) if told else None
            if not self.entries[name].works:  # what was timed stays right
                self.entries[name].row["profile_error"] = self.entries[name].row.pop("error")

    def rows(self) -> list[Row]:
        """What is known so far."""
        found = []
        for name, entry in self.entries.items():
            counter = entry.contender.counter
            known: Row = {"operators": dict(counter.operators), "collectives_left": dict(counter.left)}
            if name == "mkernel":
                known["arena_bytes"] = arena_bytes()
            partial_row = any(f"{one}_ms" not in entry.row for one in self.passes) and entry.works
            known |= {"unfinished": True} if partial_row and self.plan.times else {}
            known |= {"options": self.plan.options} if name == "mkernel" and self.plan.options else {}
            found.append({**_identity(self.cell), "contender": name, **entry.row, **known})
        return found

    def _traced(self, step: Step) -> list[trace.LaunchSummary]:
        """Our launches of one step, from their timelines. A graph has the kernels that it was captured with."""
        if self.cell.graphs and not self.plan.timeline:
            return []
        with nullcontext() if self.plan.timeline else self.tracer.tracing():
            for _ in range(2):  # in the first, kernels are loaded and memory is made
                trace.clear()
                step()
            return trace.summary(trace.collect())


def _step(load: Workload, call: Call, which: str) -> None:
    if which == "fwd":
        with torch.no_grad():
            call(load.x)
    else:
        torch.autograd.grad(call(load.x), list(load.differentiated().values()), load.dy)


def arena_bytes() -> int:
    """Symmetric memory that our operators hold in this process."""
    found = wiring.kernels()
    return found.held_bytes() if found is not None else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a cell is run, and who hears of it: `say` of each step, `publish` of rows as soon as there are some.

    `cache`: a folder for what is compiled, None for the user's.
    """

    mesh: DeviceMesh
    turn: Turn
    tracer: Tracer
    cache: Path | None
    say: Callable[[str], None]
    publish: Callable[[list[Row]], None]


def run_cell(cell: Cell, plan: Plan, place: Place) -> list[Row]:
    """The cell's rows, one a contender; collective over the pair."""
    forget_compiled()
    place.say(f"{cell}: making weights")
    turn, cache = place.turn, place.cache
    load = workload(cell, place.mesh, torch.bfloat16)  # a few kernels only: not worth the wait for a turn
    synchronize()
    run = CellRun(cell=cell, plan=plan, turn=turn, load=load, say=place.say, publish=place.publish, tracer=place.tracer)
    for name in cell.contenders(plan.contenders, plan.device):
        own = cache and cache / "-".join(map(str, cell.key)).replace(" ", "") / name
        contender = Contender(
            name=name, module=load.module, graphs=cell.graphs, cache=own if plan.compile_times else cache,
            keeps=plan.compile_times, options=plan.options, compiled=turn.enter,
        )  # fmt: skip
        run.entries[name] = Entry(contender, contender.call())
    _measure(run)
    rows = run.rows()
    del run, load
    forget_compiled()
    return rows


def forget_compiled() -> None:
    """Everything that was compiled and captured, and the memory that it held."""
    torch._dynamo.reset()
    if torch.cuda.is_available():
        reset_cudagraph_trees()
        gc.collect()
        torch.cuda.empty_cache()


def _measure(run: CellRun) -> None:
    """Forward is compiled and measured before forward with backward is compiled, so that a run that is stopped has it;
    with `quiet` both are compiled first.
    """
    # a contender that fails under CUDA graphs takes the others' compiled code with it: the one that may goes first
    order = sorted(run.entries, key=lambda name: name != "async_tp") if run.cell.graphs else list(run.entries)
    for passes in [run.passes] if run.plan.quiet else [(one,) for one in run.passes]:
        _compile(run, order, passes)
        run.turn.stop_compiling()
        for which in passes if not run.plan.compile_times else ():
            run.check(which)
            if run.plan.times:
                _race(run, which)
                if run.plan.profile or which != run.passes[-1]:
                    run.publish(run.rows())
            if run.plan.profile:
                run.look(which)


def _compile(run: CellRun, order: list[str], passes: tuple[str, ...]) -> None:
    for name in order:
        run.compile(name, "cold", passes)
    if run.plan.compile_times:
        forget_compiled()
        for name in order:
            if name in run.working and name != "eager":
                run.compile(name, "warm", passes)


def _race(run: CellRun, which: str) -> None:
    if which == "fwdbwd" and run.cell.rows <= LOSS_ROWS and not run.cell.graphs:
        run.losses()
    run.time(which)


def _identity(cell: Cell) -> Row:
    return {"model": cell.model, "form": cell.form, "B": cell.batch, "T": cell.tokens, "mode": cell.mode}
