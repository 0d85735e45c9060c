"""One cell on one rank: what can be done to its contenders, each step of it by all ranks together."""

from __future__ import annotations

import gc
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor.cudagraph_trees import reset_cudagraph_trees

from mkcompile.runtime import wiring

from . import correct
from .blocks import Workload, workload
from .cells import MODES, TRUTH_TOKENS, VARIANT, Cell
from .contenders import Call, Contender
from .plan import Entry, Place, Plan, Row, Truth
from .timing import Step, interleaved, synchronize
from .tracer import Tracer
from .turn import Turn


@dataclass(slots=True, kw_only=True)
class CellRun:
    """The state of one cell on this rank. `curve`: eager's losses. Units: `base_bytes` bytes of weights and input."""

    cell: Cell
    plan: Plan
    turn: Turn
    load: Workload
    say: Callable[[str], None]
    publish: Callable[[list[Row]], None]
    tracer: Tracer
    base_bytes: int
    entries: dict[str, Entry] = field(default_factory=dict)
    truths: dict[str, Truth] = field(default_factory=dict)
    curve: list[float] | None = None

    @property
    def working(self) -> dict[str, Entry]:
        """Entries that are still in the race."""
        return {name: entry for name, entry in self.entries.items() if entry.works}

    @property
    def passes(self) -> tuple[str, ...]:
        """Names of what is measured, as in the rows."""
        return ("fwd", "fwdbwd") if self.plan.train and self.load.trains else ("fwd",)

    @contextmanager
    def step(self, name: str, what: str, kind: str = "error") -> Iterator[None]:
        """Whatever a contender raises, on any rank, becomes its row's error; all ranks come out of here together.

        `kind`: what it is in the row; with another kind of error the contender is still in the race.
        """
        entry = self.entries[name]
        self.say(f"{self.cell}: {what} {name}")
        text = ""
        try:
            yield
        except Exception as error:  # a row with its error is a result
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
        self.turn.leave()
        said: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(said, text, group=self.turn.host_group)
        for rank, one in enumerate(said):
            if one:
                entry.row.setdefault(kind, f"{what}: {one}" if said[0] else f"{what}: on rank {rank}: {one}")

    def compile(self, name: str, kind: str, passes: tuple[str, ...]) -> None:
        """Each pass at its first call. Seconds leave out the wait for other pairs' turns."""
        entry = self.entries[name]
        if name == "eager" or not entry.works:
            return
        skipped = counters["inductor"]["cudagraph_skips"]
        with entry.contender.compiling():
            for which in passes:
                if not entry.works:
                    break
                fused, left = entry.contender.counter.sums()
                with self.step(name, f"compiling {which} of", "error" if kind == "cold" else "compile_error"):
                    started, waited = time.perf_counter(), self.turn.waited_s
                    correct.values_of(self.load, entry.call, train=which == "fwdbwd")
                    seconds = time.perf_counter() - started - (self.turn.waited_s - waited)
                    if self.plan.times_compiling(self.cell):
                        entry.row[f"compile_{kind}_{which}_s"] = round(seconds, 2)
                if kind == "cold":  # a warm one may come whole from a cache, and is not counted
                    now_fused, now_left = entry.contender.counter.sums()
                    entry.row |= {f"{which}_fused": now_fused - fused, f"{which}_left": now_left - left}
                if self.cell.graphs and entry.works and kind == "cold":
                    self.capture(name, which)
        entry.skips += counters["inductor"]["cudagraph_skips"] - skipped
        if self.cell.graphs:
            entry.row["cudagraph_skips"] = entry.skips
        if self.cell.graphs and not entry.works and not self.plan.together:
            forget_compiled()  # what it left in the pool of the CUDA graphs would fail the others, too

    def compile_again(self, order: Iterable[str]) -> None:
        """From what is in the caches, where the plan asks what that takes; rows that there are have been written."""
        if not self.plan.times_compiling(self.cell):
            return
        self.publish(self.rows())
        forget_compiled()
        for name in order:
            if name in self.working:
                self.compile(name, "warm", self.passes)

    def adopt(self, name: str, which: str, compiled: Entry) -> None:
        """Capture what was compiled in the other mode, where it ran without CUDA graphs."""
        entry = self.entries[name]
        if "error" in compiled.row:
            entry.row.setdefault("error", compiled.row["error"])
        if not entry.works:
            return
        entry.row |= {key: compiled.row[key] for key in (f"{which}_fused", f"{which}_left")}
        entry.row["compiled_in"] = MODES[0]
        skipped = counters["inductor"]["cudagraph_skips"]
        with self.step(name, f"warming up {which} of"):
            self.turn.enter()
            _step(self.load, entry.call, which)
        if entry.works:
            self.capture(name, which)
        entry.skips += counters["inductor"]["cudagraph_skips"] - skipped
        entry.row["cudagraph_skips"] = entry.skips + compiled.skips

    def capture(self, name: str, which: str) -> None:
        """The calls in which CUDA graphs are recorded, which is when their memory is taken, and replayed."""
        entry = self.entries[name]
        step = partial(_step, self.load, entry.call, which)
        with self.step(name, f"capturing {which} of"):
            self.turn.enter()
            entry.row[f"{which}_peak_bytes"] = self._peak_bytes(step)
            step()

    def check(self, which: str) -> None:
        """One pass against eager, and against the truth in fp32 where that is small enough."""
        train, truth = which == "fwdbwd", self.truths[which]
        for name, entry in self.working.items():
            ratios = truth.of_eager or dict.fromkeys(truth.values, 0.0)
            with self.step(name, f"checking {which} of"):
                if name != "eager":
                    self.turn.enter()
                    ratios = correct.ratios(correct.values_of(self.load, entry.call, train), truth.values)
            if not entry.works:
                continue
            errors = correct.of_worst_rank(ratios, self.turn.host_group)
            wrong = correct.too_far(errors, truth.of_eager)
            if wrong:
                entry.row.setdefault("error", f"wrong result: {wrong}")
            if name == "mkernel" and entry.row[f"{which}_fused"] and torch.cuda.is_available() and not arena_bytes():
                entry.row.setdefault("error", "none of the kernels was launched")
            worst = max(errors, key=lambda key: errors[key])
            entry.row |= {"checked": entry.works, "judged_by": "eager" if truth.of_eager is None else "fp32"}
            entry.row |= {"worst_error": errors[worst], "worst_tensor": worst}

    def in_fp32(self) -> Workload | None:
        """What the truth is computed with; None where there is none. A few kernels only: not worth a turn."""
        return correct.in_fp32(self.load) if self.cell.tokens <= TRUTH_TOKENS else None

    def find_truth(self, which: str, exact: Workload | None) -> None:
        """What a pass should give: kept for the checks of one pass, since it is as large as all gradients.

        Eager runs for the first time here, behind what the others' compilations have found out of sharded tensors.
        """
        train, of_eager = which == "fwdbwd", None
        self.turn.enter()
        wanted = truth = correct.values_of(self.load, self.load.module, train)
        if exact is not None:
            truth = correct.truth_of(exact, train)
            of_eager = correct.of_worst_rank(correct.ratios(wanted, truth), self.turn.host_group)
        self.turn.leave()
        self.truths[which] = Truth(truth, of_eager)

    def losses(self) -> None:
        """20 training steps of each contender, from the same weights."""
        if self.curve is None:
            self.turn.enter()
            self.curve = correct.loss_curve(self.load, self.load.module, synchronize)
            self.turn.leave()
        wanted = self.curve
        for name, entry in self.working.items():
            with self.step(name, "training with"):
                self.turn.enter()
                curve = wanted if name == "eager" else correct.loss_curve(self.load, entry.call, synchronize)
            if not entry.works:
                continue
            distance = correct.curve_distance(curve, wanted, self.turn.host_group)
            entry.row |= {"losses": curve, "losses_from_eager": round(distance, 6)}
            if not distance <= correct.CURVES_APART:
                entry.row.setdefault("error", f"losses are {distance:.2e} of the first off")

    def steps(self, which: str) -> dict[str, Step]:
        """What is timed of each contender."""
        return {name: partial(_step, self.load, entry.call, which) for name, entry in self.working.items()}

    def plain_step(self, name: str, which: str) -> None:
        """Without CUDA graphs, whatever the cell's mode is."""
        _step(self.load, self.entries[name].contender.call(graphs=False), which)

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
            if not self.cell.graphs:  # a replay takes no memory
                row[f"{which}_peak_bytes"] = self._peak_bytes(self.steps(which)[name])
        self.turn.leave()
        for name in self.working:
            with self.step(name, f"after timing {which} of"):
                wiring.check()  # a launch that gave up was fast

    def _peak_bytes(self, step: Step) -> int | None:
        """Of torch's allocator in one step on this rank, with weights and input, without what other contenders hold;
        symmetric memory, which is not the allocator's, is `arena_bytes` in the rows.
        """
        if not torch.cuda.is_available():
            step()
            return None
        synchronize()
        torch.cuda.reset_peak_memory_stats()
        others_bytes = torch.cuda.memory_allocated() - self.base_bytes
        step()
        synchronize()
        return torch.cuda.max_memory_allocated() - others_bytes

    def rows(self) -> list[Row]:
        """What is known so far."""
        found = []
        for name, entry in self.entries.items():
            counter = entry.contender.counter
            known: Row = {"operators": dict(counter.operators), "collectives_left": dict(counter.left)}
            if name == "mkernel":
                known["arena_bytes"] = arena_bytes()
            known |= {"unfinished": True} if entry.works and not self._is_whole(name, entry.row) else {}
            options = entry.contender.options
            known |= {"options": options} if name in ("mkernel", VARIANT) and options else {}
            found.append({**_identity(self.cell), "contender": name, **entry.row, **known})
            for which in self.passes:
                entry.row.pop(f"{which}_profile", None)  # long, and written once
        return found

    def _is_whole(self, name: str, row: Row) -> bool:
        """Is everything in the row that the plan asks for, or why it is not?"""
        if self.plan.compiles_only:
            return True
        keys = ["losses" if len(self.passes) > 1 else "checked"]
        keys += [f"{which}_ms" for which in self.passes] if self.plan.times else []
        seen = ("inside_us" if name == "mkernel" else "between_us", "exposed_note", "profile_error")
        looked = not self.plan.looks_at(self.cell) or all(
            any(f"{which}_{kind}" in row for kind in seen) for which in self.passes
        )
        return looked and all(key in row for key in keys)


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


def begin(cell: Cell, plan: Plan, place: Place, load: Workload) -> CellRun:
    """A cell with its weights, and no contender yet."""
    return CellRun(
        cell=cell, plan=plan, turn=place.turn, load=load, say=place.say, publish=place.publish, tracer=place.tracer,
        base_bytes=torch.cuda.memory_allocated() if torch.cuda.is_available() else 0,
    )  # fmt: skip


def weights_of(cell: Cell, place: Place) -> Workload:
    """A few kernels only: not worth the wait for a turn."""
    forget_compiled()
    place.say(f"{cell}: making weights")
    load = workload(cell, place.mesh, torch.bfloat16)
    synchronize()
    return load


def contender_of(run: CellRun, name: str, place: Place, graphs: bool) -> Contender:
    """Compiled for CUDA graphs or not, with the caches that the plan gives it."""
    plan, apart = run.plan, run.plan.times_compiling(run.cell)
    own = place.apart / "-".join(map(str, run.cell.key)).replace(" ", "") / name
    return Contender(
        name=name, module=run.load.module, graphs=graphs, cache=own if apart else place.cache,
        keeps=apart, options=plan.variant if name == VARIANT else plan.options,
        compiled=place.turn.enter,
    )  # fmt: skip


def compile_order(cell: Cell, names: Iterable[str]) -> list[str]:
    """Eager first; the others forwards or backwards, by the cell: it is not always Inductor that comes first, and pays
    for what a process does once.
    """
    ordered = sorted(names, key=lambda name: name != "eager")
    num_first = 1 if ordered[:1] == ["eager"] else 0
    size = "-".join(map(str, cell.key[:4]))
    return ordered[:num_first] + ordered[num_first:][:: 1 if zlib.crc32(size.encode()) % 2 else -1]


def forget_compiled() -> None:
    """Everything that was compiled and captured, and the memory that it held."""
    torch._dynamo.reset()
    if torch.cuda.is_available():
        reset_cudagraph_trees()
        gc.collect()
        torch.cuda.empty_cache()


def _identity(cell: Cell) -> Row:
    return {"model": cell.model, "form": cell.form, "B": cell.batch, "T": cell.tokens, "mode": cell.mode}
