"""`python -m benchmarks.gather_small`: all-gather + GEMM of few rows, inside CUDA graphs and eager.

As `benchmarks.small`: weights are rotated, so that they stream from HBM; every contender is checked before it is timed.
`--sweep` times every tile that pushes or streams instead of the other contenders.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from mkcompile.runtime.driver import DriverError
from mkcompile.runtime.gather_launch import GatherSize
from mkcompile.runtime.gather_schedule import GatherChoice, Variant, choices, choose_gather, stream_choices
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.warmup import warm_up

from .gather_contenders import Gatherer, chosen, others, text_of
from .graph_timing import NUM_CALLS, measure_graphs
from .run import measure_link
from .shapes import Shape
from .small import Bench, checked_graph, eager_timings, row_of, runs_right
from .small_contenders import Contender, Rotation
from .workspaces import Arena

OP = "all_gather_gemm"
SHAPES = tuple(
    Shape(m, n, k) for n, k in ((7168, 8192), (1280, 8192), (4096, 4096)) for m in (2, 16, 64, 128, 256, 512, 1024)
)
_CACHES_BYTES = 320 << 20
_HBM_BYTES_PER_MS = 4.3e9
_DELIVERY_MS = 0.0025
_MAX_GRID = 128
_STREAMED = 4
#: Beside the forms that stream: each in its best tile.
_WHOLE: tuple[Variant, ...] = ("push", "pull")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One shape on this rank: its shard, all rows, and weights that are larger than any cache together."""

    shape: Shape
    shard: Tensor
    rotation: Rotation

    @staticmethod
    def of(shape: Shape) -> Case:
        """Different on every rank."""
        generator = torch.Generator(device="cuda").manual_seed(1000 * shape.m + dist.get_rank())

        def matrix(rows: int) -> Tensor:
            return torch.randn(rows, shape.k, device="cuda", generator=generator, dtype=torch.bfloat16)

        shard = matrix(shape.m // dist.get_world_size())
        whole = shard.new_empty(shape.m, shape.k)
        dist.all_gather_into_tensor(whole, shard)
        count = min(NUM_CALLS, max(2, -(-_CACHES_BYTES // (shape.n * shape.k * 2))))
        return Case(
            shape=shape, shard=shard, rotation=Rotation(x=whole, weights=tuple(matrix(shape.n) for _ in range(count)))
        )

    @property
    def size(self) -> GatherSize:
        """Of the launch."""
        rows, world = self.shard.shape[0], dist.get_world_size()
        return GatherSize(segment_rows=rows, k=self.shape.k, n=(self.shape.n,), world=world)

    def baselines(self, group: str) -> Iterator[Contender]:
        """cuBLAS on all rows, then the contenders that are not ours."""
        x, weights = self.rotation.x, self.rotation.weights
        out, gathered = x.new_empty(x.shape[0], self.shape.n), torch.empty_like(x)
        yield Contender(name="cublas", calls=tuple(lambda w=w: torch.mm(x, w.t(), out=out) for w in weights))  # type: ignore[misc]
        made: dict[str, list[Callable[[], Tensor]]] = {}
        for w in weights:
            for name, call in others(self.shard, w, group, gathered, out):
                made.setdefault(name, []).append(call)
        yield from (Contender(name=name, calls=tuple(calls)) for name, calls in made.items())

    def ours(self, name: str, choice: GatherChoice, gatherer: Gatherer) -> Contender:
        """One variant, prepared for every weight."""
        out = self.shard.new_empty(self.shape.m, self.shape.n)
        calls = tuple(gatherer.prepare(choice, self.size, self.shard, w, out) for w in self.rotation.weights)
        return Contender(name=name, calls=calls, variant=text_of(choice))


def swept(size: GatherSize) -> Iterator[GatherChoice]:
    """All variants that push, or stream."""
    base = KernelConfig(operator="all_gather_gemm")
    for choice in choices(base, size, _MAX_GRID, returned=False):
        if choice.variant == "push":
            yield choice
    yield from stream_choices(base, size, _MAX_GRID, returned=False)


def contenders_of(case: Case, gatherer: Gatherer, group: str, sweep: bool) -> list[Contender]:
    """cuBLAS first."""
    named = list(case.baselines(group))
    if sweep:
        return [named[0], *(case.ours(text_of(one), one, gatherer) for one in swept(case.size))]
    found = [*named, case.ours("mkcompile", chosen(case.size, None), gatherer)]
    found += [case.ours(f"mkcompile_{variant}", chosen(case.size, variant), gatherer) for variant in _WHOLE]
    streamed = sorted(stream_choices(KernelConfig(operator="all_gather_gemm"), case.size, _MAX_GRID, False), key=_us)
    return found + [case.ours(f"mkcompile_stream{i}", one, gatherer) for i, one in enumerate(streamed[:_STREAMED])]


def _us(choice: GatherChoice) -> float:
    return choice.us


def graph_of(contender: Contender, rotation: Rotation, truths: list[Tensor]) -> torch.cuda.CUDAGraph | None:
    """None also where it can't be captured: the same on all ranks."""
    try:
        return checked_graph("gemm", contender, rotation, truths)
    except (DriverError, RuntimeError) as error:
        sys.stderr.write(f"{contender.name} ({contender.variant}): {error}\n")
        return None


def rows_of(bench: Bench, shape: Shape, gatherer: Gatherer, options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Check, then time, one row a contender and regime."""
    case = Case.of(shape)
    last = (NUM_CALLS - 1) % len(case.rotation.weights)
    x = case.rotation.x.double()
    truths = [(x @ case.rotation.weights[at].double().t()).float() for at in (0, last)]
    arena = gatherer.arena
    assert arena.group is not None
    taking_part = contenders_of(case, gatherer, arena.group.group_name, options.sweep)
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    right: set[str] = set()
    for contender in taking_part:
        if contender.name == "async_tp":  # its graphs can't be captured on every version: eager only
            if runs_right(contender, truths[0]):
                right.add(contender.name)
            continue
        graph = graph_of(contender, case.rotation, truths)
        bench.check()
        if graph is not None:
            graphs[contender.name] = graph
    timings = {"graph": measure_graphs(graphs, bench.rounds, bench.host_group)}
    if not options.sweep and not options.no_eager:
        timings["eager"] = eager_timings(bench, taking_part, right | set(graphs))
    bench.check()
    link_ms = shape.m * shape.k * 2 * (arena.world - 1) / arena.world / bench.link
    for regime, found in timings.items():
        floor_ms = max(found["cublas"].ms, shape.n * shape.k * 2 / _HBM_BYTES_PER_MS, link_ms) + _DELIVERY_MS
        for contender in taking_part:
            if regime == "graph" and contender.name in right:
                continue
            yield {**row_of(bench, OP, shape, contender, found.get(contender.name), floor_ms), "regime": regime}


def worker(rank: int, options: argparse.Namespace) -> None:
    """One rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29547", RANK=str(rank), WORLD_SIZE="2")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    started, arena = time.monotonic(), Arena(256 << 20)
    host_group = dist.new_group(backend="gloo")
    bench = Bench(arena=arena, world=2, link=measure_link(), host_group=host_group, rounds=options.rounds)
    gatherer = Gatherer.of(arena, 32 << 20)
    common = {
        "link_gbps": round(bench.link / 1e6, 1), "commit": options.commit, "torch": torch.__version__,
        "device": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    for shape in SHAPES:
        late = torch.tensor(float(time.monotonic() - started > options.seconds))
        dist.all_reduce(late, dist.ReduceOp.MAX, group=host_group)
        if late:
            break
        if shape.m not in (options.rows or (shape.m,)) or shape.n not in (options.columns or (shape.n,)):
            continue
        for row in rows_of(bench, shape, gatherer, options):
            if rank == 0:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**row, **common}) + "\n")
        torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: list[str]) -> None:
    """Compile, start the ranks and wait for them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gather_small", description=__doc__)
    parser.add_argument("--rows", type=int, action="append", help="only these M")
    parser.add_argument("--columns", type=int, action="append", help="only these N")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--no-eager", action="store_true", help="only inside graphs")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no shape after this time")
    parser.add_argument("--commit", default="unknown", help="written into every line")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended")
    options = parser.parse_args(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    base = KernelConfig(operator="all_gather_gemm")
    configs: dict[KernelConfig, None] = {}
    for shape in SHAPES:
        size = GatherSize(segment_rows=shape.m // 2, k=shape.k, n=(shape.n,), world=2)
        configs.update({one.config: None for one in swept(size)})
        for variant in (None, *_WHOLE):
            configs[choose_gather(base, size, _MAX_GRID, variant=variant).config] = None
    for _ in warm_up(configs, min(30, os.cpu_count() or 1)):
        pass
    mp.spawn(worker, args=(options,), nprocs=2)


if __name__ == "__main__":
    main(sys.argv[1:])
