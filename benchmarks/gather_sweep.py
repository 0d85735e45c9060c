"""`python -m benchmarks.gather_sweep --out FILE`: all-gather GEMMs by every variant in every tile.

One process drives both GPUs; the result of each variant is checked, then all are timed in turn, in bursts, beside
cuBLAS's product of the gathered rows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any

import torch

from mkcompile.runtime.gather_launch import GatherSize
from mkcompile.runtime.gather_operation import GatherTensors, Prepared
from mkcompile.runtime.gather_schedule import (
    GatherChoice,
    choose_gather,
    engine_choice,
    library_choice,
    pull_choice,
    push_choice,
    read_choice,
    shared_choice,
)
from mkcompile.runtime.kernel_config import SHARED_GATHER_TILES, KernelConfig
from mkcompile.runtime.warmup import warm_up
from tests.gpu.gather_calls import Engines, prepare_rank
from tests.gpu.ranks import RankGroup

from .shapes import GATHERED

TILES = ((128, 256), (128, 224), (128, 192), (128, 160), (128, 128), (64, 128))
#: Also where M or N is small.
SMALL_TILES = (*TILES, (64, 256), (64, 64))
CHUNKS = (1, 2, 4)
#: Of k, in each of them.
SLICES = (1, 2, 4)
#: Nanoseconds between two images of 128 rows of a push, 60: 273 GB/s, and images behind one fence; 0: all at once.
PACES = ((0, 1), (40, 2), (40, 4), (45, 1), (45, 2), (45, 4), (50, 1), (50, 2), (50, 4), (55, 1), (55, 2), (55, 4),
         (60, 1), (60, 2), (70, 1), (70, 2))  # fmt: skip
_BACKLOG_CYCLES = 1_000_000
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Case:
    """`m` gathered rows of `k`, times a weight of each of the `n` columns."""

    m: int
    n: tuple[int, ...]
    k: int

    @property
    def flop(self) -> int:
        """Operations of one rank."""
        return 2 * self.m * sum(self.n) * self.k

    @property
    def tiles(self) -> tuple[tuple[int, int], ...]:
        """Those that are swept."""
        return SMALL_TILES if self.m < 2048 or max(self.n) <= 256 else TILES


#: The shapes of `benchmarks.run`; several weights on one gather; few rows; weights of one column tile.
CASES = (
    *(Case(shape.m, (shape.n,), shape.k) for shape in GATHERED),
    Case(2048, (1024, 128, 128), 8192), Case(8192, (1024, 128, 128), 8192), Case(4096, (3584, 3584), 8192),
    Case(1024, (1280,), 8192), Case(512, (1280,), 8192), Case(1024, (7168,), 8192), Case(256, (7168,), 8192),
    Case(2048, (64,), 8192), Case(4096, (256,), 8192), Case(512, (7168,), 8192), Case(512, (4096,), 4096),
    Case(1024, (4096,), 4096),
)  # fmt: skip


class Pair:
    """Two ranks, and the operands of one case on each."""

    def __init__(self, group: RankGroup, engines: Engines, case: Case) -> None:
        self.group, self.engines = group, engines
        self.size = GatherSize(segment_rows=case.m // 2, k=case.k, n=case.n, world=2)
        self.tensors: list[GatherTensors] = []
        self.gathered: list[torch.Tensor] = []
        for rank, device in enumerate(group.devices):
            generator = torch.Generator(device=f"cuda:{device}").manual_seed(17 + rank)
            where: dict[str, Any] = {"device": f"cuda:{device}", "dtype": torch.bfloat16}
            weights = [torch.randn(n, case.k, generator=generator, **where) for n in case.n]
            self.tensors.append(
                GatherTensors(
                    shard=torch.randn(case.m // 2, case.k, generator=generator, **where), weights=weights,
                    w=[one.t() for one in weights], bias=[None] * len(case.n),
                    outs=[torch.empty(case.m, n, **where) for n in case.n], gathered=None,
                )
            )  # fmt: skip
        for device in group.devices:
            self.gathered.append(torch.cat([one.shard.to(f"cuda:{device}") for one in self.tensors]))

    def cublas(self, rank: int) -> None:
        """The products alone."""
        one = self.tensors[rank]
        for w, out in zip(one.w, one.outs, strict=True):
            torch.mm(self.gathered[rank], w, out=out)

    def prepare(self, choice: GatherChoice) -> list[Prepared]:
        """One launch a rank."""
        engines = self.engines if choice.schedule.by_engine else None
        return [prepare_rank(self.group, r, choice, self.size, self.tensors[r], engines, None) for r in range(2)]

    def error(self, run: Callable[[int], None]) -> float:
        """Relative error of the worse rank on sampled rows; NaN where something was not written."""
        worst = 0.0
        for one in self.tensors:
            for out in one.outs:
                out.fill_(float("nan"))
        self.group.synchronize()
        self.each(run)
        self.group.synchronize()
        self.group.check()
        for rank, one in enumerate(self.tensors):
            for out, weight in zip(one.outs, one.weights, strict=True):
                rows = torch.linspace(0, out.shape[0] - 1, 128, device=out.device).long()
                truth = self.gathered[rank][rows].float() @ weight.float().t()
                worst = max(worst, float((out[rows].float() - truth).norm() / truth.norm()))
                if not torch.isfinite(out).all():
                    return float("nan")
        return worst

    def each(self, run: Callable[[int], None]) -> None:
        """On every rank, each on its stream."""
        for rank, device in enumerate(self.group.devices):
            with torch.cuda.device(device), torch.cuda.stream(self.group.streams[rank]):
                run(rank)

    def burst_us(self, run: Callable[[int], None], calls: int) -> float:
        """Mean of consecutive calls after one that is not timed; the slower rank's."""
        self.group.synchronize()
        time.sleep(0.004)
        events: list[list[torch.cuda.Event]] = [[], []]
        self.each(lambda rank: torch.cuda._sleep(_BACKLOG_CYCLES))
        self.each(run)

        def mark(rank: int) -> None:
            events[rank].append(torch.cuda.Event(enable_timing=True))
            events[rank][-1].record()

        self.each(mark)
        for _ in range(calls):
            self.each(run)
        self.each(mark)
        self.group.synchronize()
        return max(start.elapsed_time(end) for start, end in events) * 1e3 / calls


def variants(size: GatherSize, max_grid: int, tiles: Sequence[tuple[int, int]]) -> dict[str, GatherChoice]:
    """By name."""
    base = KernelConfig(operator="all_gather_gemm")
    found = {"chosen": choose_gather(base, size, max_grid)}
    for tile in tiles:
        config = KernelConfig(operator="all_gather_gemm").with_tile(*tile)
        choice = push_choice(config, size, max_grid, returned=False)
        pushes = {"push": replace(choice, schedule=replace(choice.schedule, pace_ns=0, fenced=1))}
        if tile in SHARED_GATHER_TILES:
            pushes["shared"] = shared_choice(config, size, max_grid)
        for (name, one), (pace_ns, fenced) in product(pushes.items(), PACES):
            schedule = replace(one.schedule, pace_ns=pace_ns * tile[0] // 128, fenced=fenced)
            way = f"{name} {tile[0]}x{tile[1]} grid{schedule.grid} band{schedule.band}"
            found[f"{way} pace{pace_ns} f{fenced}"] = replace(one, schedule=schedule)
        pulled = pull_choice(config, size, max_grid)
        found[f"pull {tile[0]}x{tile[1]} grid{pulled.schedule.grid}"] = pulled
        found.update(engine_variants(config, size, max_grid))
        if size.tiles_n(config) == len(size.n):
            found[f"read {tile[0]}x{tile[1]} grid{max_grid}"] = read_choice(config, size, max_grid)
    for chunks in CHUNKS:
        found[f"library c{chunks}"] = library_choice(KernelConfig(operator="all_gather_gemm"), size, chunks)
    return found


def engine_variants(config: KernelConfig, size: GatherSize, max_grid: int) -> dict[str, GatherChoice]:
    """Chunks of rows times slices of k."""
    found = {}
    for chunks, slices in product(CHUNKS, SLICES):
        rows = ceil(size.shard_rows / chunks / 128) * 128
        if chunks * slices > 8 or rows * (chunks - 1) >= size.shard_rows:
            continue
        engine = engine_choice(config, size, max_grid)
        schedule = replace(engine.schedule, group_rows=rows, slices=slices)
        way = f"engine {config.block_m}x{config.block_n} c{chunks} s{slices} grid{schedule.grid}"
        found[way] = replace(engine, schedule=schedule)
    return found


def sweep(group: RankGroup, engines: Engines, case: Case, names: Sequence[str] = ("",)) -> dict[str, object]:
    """All variants of one case in whose name one of `names` occurs."""
    pair = Pair(group, engines, case)
    runs: dict[str, Callable[[int], None]] = {"cublas": pair.cublas}
    predicted = {}
    for name, choice in variants(pair.size, group.max_grid(), case.tiles).items():
        if not any(part in name for part in names):
            continue
        launches = pair.prepare(choice)
        runs[name] = lambda rank, launches=launches: launches[rank].run(  # type: ignore[misc]
            pair.tensors[rank], group.streams[rank].cuda_stream, False
        )
        predicted[name] = round(choice.us, 1)
    errors = {name: round(pair.error(run), 6) for name, run in runs.items()}
    calls = max(3, min(10, int(2500 / (case.flop / 700e6))))
    times: dict[str, list[float]] = {name: [] for name in runs}
    order, shuffled = list(runs), random.Random(5)
    for _ in range(_ROUNDS):
        shuffled.shuffle(order)
        for name in order:
            times[name].append(pair.burst_us(runs[name], calls))
    rows = {
        name: {"us": round(statistics.median(values[1:]), 1), "predicted": predicted.get(name), "error": errors[name]}
        for name, values in times.items()
    }
    return {"m": case.m, "n": sum(case.n), "weights": case.n, "k": case.k, "variants": rows}


def main() -> None:
    """One JSON line a case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--case", type=int, action="append", help="index into the cases; default: all")
    parser.add_argument("--name", action="append", help="part of the variants' names; default: all")
    parser.add_argument("--limit-s", type=float, default=240.0, help="begin no case after this time")
    parser.add_argument("--devices", type=int, nargs=2, default=(0, 1), help="0 0: does it work, on one GPU")
    parser.add_argument("--commit", default="unknown", help="written into every line")
    options = parser.parse_args()
    warm_up_variants()
    group = RankGroup(options.devices, arena_bytes=1200 << 20, max_tiles=32768, timeout_s=5.0)
    engines = Engines(group, area_bytes=300 << 20)
    started = time.monotonic()
    for index in options.case or range(len(CASES)):
        if time.monotonic() - started > options.limit_s:
            break
        row = {**sweep(group, engines, CASES[index], options.name or ("",)), "commit": options.commit}
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def warm_up_variants() -> None:
    """Compile what is swept, in parallel."""
    base = KernelConfig(operator="all_gather_gemm")
    configs = [replace(base.with_tile(*tile), pulls=pulls) for tile in SMALL_TILES for pulls in (False, True)]
    configs += [replace(base.with_tile(*tile), split=2, stages=0) for tile in SHARED_GATHER_TILES]
    for _ in warm_up(configs, min(30, os.cpu_count() or 1)):
        pass


if __name__ == "__main__":
    main()
