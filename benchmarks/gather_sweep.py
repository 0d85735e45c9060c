"""`python -m benchmarks.gather_sweep --out FILE`: all-gather GEMMs by every variant in every tile.

One process drives both GPUs; the result of each variant is checked, then all are timed in turn, in bursts, beside
cuBLAS's product of the gathered rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import torch

from mkcompile.runtime.gather_launch import GatherSize
from mkcompile.runtime.gather_operation import GatherTensors, Prepared
from mkcompile.runtime.gather_schedule import GatherChoice, engine_choice, library_choice, push_choice
from mkcompile.runtime.kernel_config import KernelConfig
from tests.gpu.gather_calls import Engines, prepare_rank
from tests.gpu.ranks import RankGroup

from .shapes import GATHERED, Shape

TILES = ((128, 256), (128, 224), (128, 192), (128, 160), (128, 128), (64, 128))
CHUNKS = (1, 4)
_SM_RESERVE = 4
_BACKLOG_CYCLES = 1_000_000
_ROUNDS = 5


class Pair:
    """Two GPUs, and the operands of one shape on each."""

    def __init__(self, group: RankGroup, engines: Engines, shape: Shape) -> None:
        self.group, self.engines = group, engines
        self.size = GatherSize(segment_rows=shape.m // 2, k=shape.k, n=(shape.n,), world=2)
        self.tensors: list[GatherTensors] = []
        self.gathered: list[torch.Tensor] = []
        for device in group.devices:
            generator = torch.Generator(device=f"cuda:{device}").manual_seed(17 + device)
            where: dict[str, Any] = {"device": f"cuda:{device}", "dtype": torch.bfloat16}
            w = torch.randn(shape.n, shape.k, generator=generator, **where)
            self.tensors.append(
                GatherTensors(
                    shard=torch.randn(shape.m // 2, shape.k, generator=generator, **where), w=[w.t()], weights=[w],
                    bias=[None], outs=[torch.empty(shape.m, shape.n, **where)], gathered=None,
                )
            )  # fmt: skip
        for device in group.devices:
            self.gathered.append(torch.cat([one.shard.to(f"cuda:{device}") for one in self.tensors]))

    def cublas(self, rank: int) -> None:
        """The product alone."""
        one = self.tensors[rank]
        torch.mm(self.gathered[rank], one.w[0], out=one.outs[0])

    def prepare(self, choice: GatherChoice) -> list[Prepared]:
        """One launch a rank."""
        engines = self.engines if choice.schedule.by_engine else None
        return [prepare_rank(self.group, r, choice, self.size, self.tensors[r], engines, None) for r in range(2)]

    def error(self, run: Callable[[int], None]) -> float:
        """Relative error of the worse rank on sampled rows; NaN where something was not written."""
        worst = 0.0
        for one in self.tensors:
            one.outs[0].fill_(float("nan"))
        self.group.synchronize()
        self.each(run)
        self.group.synchronize()
        self.group.check()
        for rank, one in enumerate(self.tensors):
            out = one.outs[0]
            rows = torch.linspace(0, out.shape[0] - 1, 128, device=out.device).long()
            truth = self.gathered[rank][rows].float() @ one.weights[0].float().t()
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
    found = {}
    for tile in tiles:
        config = KernelConfig(operator="all_gather_gemm").with_tile(*tile)
        choice = push_choice(config, size, max_grid, returned=False)
        for band in sorted({8, choice.schedule.band}):
            pushed = replace(choice, schedule=replace(choice.schedule, band=band))
            found[f"push {tile[0]}x{tile[1]} grid{choice.schedule.grid} band{band}"] = pushed
        for chunks in CHUNKS:
            engine = engine_choice(config, size, max_grid, returned=False)
            rows = ceil(size.shard_rows / chunks / 128) * 128
            engine = replace(engine, schedule=replace(engine.schedule, group_rows=rows))
            found[f"engine {tile[0]}x{tile[1]} c{chunks} grid{engine.schedule.grid}"] = engine
    for chunks in CHUNKS:
        found[f"library c{chunks}"] = library_choice(KernelConfig(operator="all_gather_gemm"), size, chunks)
    return found


def sweep(group: RankGroup, engines: Engines, shape: Shape, tiles: Sequence[tuple[int, int]]) -> dict[str, object]:
    """All variants of one shape."""
    pair = Pair(group, engines, shape)
    runs: dict[str, Callable[[int], None]] = {"cublas": pair.cublas}
    predicted = {}
    max_grid = torch.cuda.get_device_properties(0).multi_processor_count - _SM_RESERVE
    for name, choice in variants(pair.size, max_grid, tiles).items():
        launches = pair.prepare(choice)
        runs[name] = lambda rank, launches=launches: launches[rank].run(  # type: ignore[misc]
            pair.tensors[rank], group.streams[rank].cuda_stream, False
        )
        predicted[name] = round(choice.us, 1)
    errors = {name: pair.error(run) for name, run in runs.items()}
    calls = max(3, min(10, int(2500 / (shape.flop / 700e6))))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_ROUNDS):
        for name, run in runs.items():
            times[name].append(pair.burst_us(run, calls))
    rows = {
        name: {"us": round(statistics.median(values[1:]), 1), "predicted": predicted.get(name), "error": errors[name]}
        for name, values in times.items()
    }
    return {"m": shape.m, "n": shape.n, "k": shape.k, "variants": rows}


def main() -> None:
    """One JSON line a shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", type=int, action="append")
    parser.add_argument("--limit-s", type=float, default=240.0)
    options = parser.parse_args()
    group = RankGroup((0, 1), arena_bytes=700 << 20, max_tiles=32768, timeout_s=5.0)
    engines = Engines(group, area_bytes=300 << 20)
    started = time.monotonic()
    for index in options.shape or range(len(GATHERED)):
        if time.monotonic() - started > options.limit_s:
            break
        row = sweep(group, engines, GATHERED[index], TILES)
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
