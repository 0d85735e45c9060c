"""`python -m benchmarks.trace_cost --out FILE`: what recording the timeline costs: kernels, traced and not.

One process drives both ranks; with `--devices 0 0` they share a GPU, and only the ratios mean something.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from mkcompile.runtime.gather_form import GatherForm
from mkcompile.runtime.gather_launch import GatherSize
from mkcompile.runtime.gather_operation import GatherSite
from mkcompile.runtime.gather_schedule import push_choice
from mkcompile.runtime.kernel import compile_kernel, load_kernel
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.warmup import warm_up
from tests.gpu.gather_calls import draw
from tests.gpu.ranks import RankGroup, nan_outputs, random_input

from .shapes import Shape

SHAPES = (Shape(2048, 4096, 2048), Shape(8192, 8192, 1024))
CONFIGS = (
    KernelConfig(operator="gemm_reduce_scatter"),
    KernelConfig(operator="gemm_all_reduce", broadcast="staged"),
    KernelConfig(operator="all_gather_gemm"),
)
_ROUNDS, _CALLS = 9, 10
_BACKLOG_CYCLES = 1_000_000


def reducing(group: RankGroup, config: KernelConfig, shape: Shape) -> Callable[[], None]:
    """One launch a rank, of a product that is summed."""
    inputs = [
        random_input(rank, device, shape.m, shape.n, shape.k, config) for rank, device in enumerate(group.devices)
    ]
    rows = shape.m // group.world if config.operator == "gemm_reduce_scatter" else shape.m
    launches = group.prepare(config, inputs, nan_outputs(group, rows, shape.n, config))
    return lambda: group.run(launches)


def gathering(group: RankGroup, config: KernelConfig, shape: Shape) -> Callable[[], None]:
    """The same of an all-gather, by push."""
    size = GatherSize(segment_rows=shape.m // group.world, k=shape.k, n=(shape.n,), world=group.world)
    choice = push_choice(config, size, group.max_grid(), returned=False)
    prepared = []
    for rank, device in enumerate(group.devices):
        tensors = draw(group, rank, config, size, 0, False, False)
        site = GatherSite(
            form=GatherForm(config=config, size=size, gathered_shape=()), choice=choice,
            kernel=load_kernel(compile_kernel(config), device), peers=group.peers(rank),
            trace=group.recorders[rank] if config.trace else None,
        )  # fmt: skip
        prepared.append((site.prepare(tensors), tensors))

    def run() -> None:
        for rank, (one, tensors) in enumerate(prepared):
            with torch.cuda.device(group.devices[rank]):
                one.run(tensors, group.streams[rank].cuda_stream, False)

    return run


def burst_us(group: RankGroup, run: Callable[[], None]) -> float:
    """Mean of consecutive calls; the slower rank's."""
    marks: list[list[torch.cuda.Event]] = [[], []]

    def mark(at: int) -> None:
        for rank, stream in enumerate(group.streams):
            with torch.cuda.device(group.devices[rank]):
                event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                event.record(stream)
                marks[at].append(event)

    group.synchronize()
    for rank in range(group.world):
        group.delay(rank, _BACKLOG_CYCLES)
    run()
    mark(0)
    for _ in range(_CALLS):
        run()
    mark(1)
    group.synchronize()
    return max(start.elapsed_time(end) for start, end in zip(*marks, strict=True)) * 1e3 / _CALLS


def rows_of(group: RankGroup) -> Iterator[dict[str, object]]:
    """One of each operator and shape."""
    for config in CONFIGS:
        for shape in SHAPES:
            make = gathering if config.operator == "all_gather_gemm" else reducing
            runs = {traced: make(group, replace(config, trace=traced), shape) for traced in (False, True)}
            times: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(_ROUNDS):
                for traced, run in runs.items():
                    times[traced].append(burst_us(group, run))
            group.check()
            off, on = (statistics.median(times[traced][1:]) for traced in (False, True))
            yield {
                "op": config.operator, "M": shape.m, "N": shape.n, "K": shape.k, "off_us": round(off, 2),
                "on_us": round(on, 2), "on_over_off": round(on / off, 4), "devices": list(group.devices),
            }  # fmt: skip


def main() -> None:
    """One JSON line an operator and shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--devices", type=int, nargs=2, default=(0, 1))
    parser.add_argument("--commit", default="unknown", help="written into every line")
    options = parser.parse_args()
    both = [replace(config, trace=traced) for config in CONFIGS for traced in (False, True)]
    for _ in warm_up(both, min(8, os.cpu_count() or 1)):
        pass
    group = RankGroup(options.devices, arena_bytes=256 << 20)
    group.record()
    for row in rows_of(group):
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, "commit": options.commit, "device": torch.cuda.get_device_name()}) + "\n")


if __name__ == "__main__":
    main()
