"""`python -m benchmarks.small`: GEMM, + all-reduce, + reduce-scatter of few rows, inside CUDA graphs and eager.

Starts one process a GPU. Every contender is checked, eager and replayed, before it is timed; one that is wrong is
reported (`"checked": false`) and not timed. `--sweep` times every variant of this project's kernels instead.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from mkcompile.runtime.kernel_config import KernelConfig, OperatorName
from mkcompile.runtime.warmup import warm_up

from .graph_timing import NUM_CALLS, capture, measure_graphs
from .measure import Timing, slowest_of, timed_ms
from .run import measure_link
from .shapes import Shape
from .small_contenders import EAGER_ONLY, OPERATORS, SHAPES, Contender, Rotation, others, ours
from .small_variants import Named, chosen_variants, paced_variants, swept_variants
from .workspaces import Arena

_CACHES_BYTES = 320 << 20
_TOLERANCE = 6e-3  # as benchmarks.check: three roundings to bf16
_HBM_BYTES_PER_MS = 4.3e9
_DELIVERY_MS = 0.0025  # one flagged tile to a peer. Source: baselines/small-2xh200.json
_SENT_SHARES = {"gemm": 0, "gemm_reduce_scatter": 1, "gemm_all_reduce": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What all measurements of one rank share. Units: `link` bytes a millisecond."""

    arena: Arena | None  # of more than one rank
    world: int
    link: float
    host_group: dist.ProcessGroup
    rounds: int

    def check(self) -> None:
        """Raises: what a kernel has reported."""
        if self.arena is not None:
            self.arena.fault.check()

    def floor_ms(self, op: str, shape: Shape, cublas_ms: float) -> float:
        """No implementation is expected to beat it."""
        sent_bytes = _SENT_SHARES[op] * shape.m * shape.n * 2 * (self.world - 1) / self.world
        streamed_ms = shape.n * shape.k * 2 / _HBM_BYTES_PER_MS
        busy_ms = max(cublas_ms, streamed_ms, sent_bytes / self.link)
        return busy_ms + (0.0 if op == "gemm" else _DELIVERY_MS)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.small", description=__doc__)
    parser.add_argument("--op", choices=OPERATORS, action="append", help="may be repeated; default: all")
    parser.add_argument("--rows", type=int, action="append", help="only these M")
    parser.add_argument("--weight", action="append", metavar="NxK", help="only these N x K")
    parser.add_argument("--sweep", action="store_true", help="every variant of this project's kernels")
    parser.add_argument("--paces", action="store_true", help="with --sweep: at which pace partials are sent")
    parser.add_argument("--no-eager", action="store_true", help="only inside graphs")
    parser.add_argument("--alone", action="store_true", help="of the others only cuBLAS's GEMM, for the floor")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no shape after this time")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--commit", default="unknown", help="written into every line")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended")
    return parser.parse_args(arguments)


def shapes(options: argparse.Namespace) -> list[Shape]:
    """The chosen ones."""
    weights = options.weight or [f"{shape.n}x{shape.k}" for shape in SHAPES]
    return [one for one in SHAPES if f"{one.n}x{one.k}" in weights and one.m in (options.rows or (one.m,))]


def operators(options: argparse.Namespace, shape: Shape) -> list[OperatorName]:
    """Those that have such a shape: rows that are scattered must be as many for every rank."""
    chosen = options.op or (OPERATORS if options.world > 1 else ("gemm",))
    return [op for op in chosen if op != "gemm_reduce_scatter" or shape.m % options.world == 0]


def rotation_of(shape: Shape, seed: int) -> Rotation:
    """Different on every rank."""
    generator = torch.Generator(device="cuda").manual_seed(1000 * seed + dist.get_rank())

    def matrix(rows: int) -> Tensor:
        return torch.randn(rows, shape.k, device="cuda", generator=generator, dtype=torch.bfloat16)

    count = min(NUM_CALLS, max(2, -(-_CACHES_BYTES // (shape.n * shape.k * 2))))
    return Rotation(x=matrix(shape.m), weights=tuple(matrix(shape.n) for _ in range(count)))


def truth_of(op: str, rotation: Rotation, weight: int, summed: bool) -> Tensor:
    """This rank's result in fp32 of fp64 sums."""
    whole = (rotation.x.double() @ rotation.weights[weight].double().t()).float()
    if not summed:
        return whole
    dist.all_reduce(whole)
    world, rank = dist.get_world_size(), dist.get_rank()
    return whole if op == "gemm_all_reduce" else whole.view(world, -1, whole.shape[1])[rank]


def all_right(out: Tensor, truth: Tensor, same: bool) -> bool:
    """On every rank; `same`: and the same bits on all of them."""
    right = ((out.float() - truth).norm() / truth.norm() < _TOLERANCE).float()
    if same:
        first = out.clone()
        dist.broadcast(first, 0)
        right = right * float(torch.equal(first.view(torch.int16), out.view(torch.int16)))
    dist.all_reduce(right, dist.ReduceOp.MIN)
    return bool(right.item())


def checked_graph(
    op: str, contender: Contender, rotation: Rotation, truths: Sequence[Tensor]
) -> torch.cuda.CUDAGraph | None:
    """The contender's calls as a graph, if both its first eager call and its last replayed one are right."""
    same = contender.name.startswith("mkcompile") and op == "gemm_all_reduce"
    calls = [contender.calls[i % len(contender.calls)] for i in range(NUM_CALLS)]
    for call in calls[:2]:
        call().fill_(float("nan"))
    eager = all_right(calls[0](), truths[0], same)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    graph = capture(calls)
    graph.replay()
    out = calls[-1]() if contender.name == "cublas_one_shot" else _replayed(graph, calls[0]())
    return graph if all_right(out, truths[1], same) and eager else None


def runs_right(contender: Contender, truth: Tensor) -> bool:
    """Another's call that may refuse so few rows: the same on all ranks."""
    try:
        out = contender.calls[0]()
    except RuntimeError as error:
        sys.stderr.write(f"{contender.name}: {error}\n")
        return False
    return all_right(out, truth, same=False)


def _replayed(graph: torch.cuda.CUDAGraph, out: Tensor) -> Tensor:
    out.fill_(float("nan"))
    graph.replay()
    return out


def row_of(
    bench: Bench, op: str, shape: Shape, contender: Contender, timing: Timing | None, floor_ms: float
) -> dict[str, object]:
    """One JSON line."""
    known = timing or Timing(ms=float("nan"), p10=float("nan"), p90=float("nan"))
    return {
        "op": op, "M": shape.m, "N": shape.n, "K": shape.k, "world": bench.world, "dtype": "bfloat16",
        "contender": contender.name, "ms": round(known.ms, 6), "p10": round(known.p10, 6), "p90": round(known.p90, 6),
        "ceiling_ms": round(floor_ms, 6), "floor_ms": round(floor_ms, 6), "checked": timing is not None,
        "variant": contender.variant,
    }  # fmt: skip


def eager_timings(bench: Bench, contenders: Sequence[Contender], right: set[str]) -> dict[str, Timing]:
    """Consecutive calls without a graph; the host's time counts where it is longer."""
    samples: dict[str, list[float]] = {one.name: [] for one in contenders if one.name in right}
    for _ in range(5):
        for one in contenders:
            if one.name not in right:
                continue
            state = iter(one.calls * 2 * NUM_CALLS)
            torch.cuda.synchronize()
            dist.barrier(group=bench.host_group)
            samples[one.name].append(timed_ms(lambda state=state: next(state)(), NUM_CALLS))  # type: ignore[misc]
    found = {}
    for name, values in samples.items():
        slowest = sorted(slowest_of(values, bench.host_group))
        found[name] = Timing(ms=slowest[len(slowest) // 2], p10=slowest[0], p90=slowest[-1])
    return found


def variants_of(options: argparse.Namespace) -> Callable[[OperatorName, Shape, int], Named]:
    """Of this project's kernels."""
    if not options.sweep:
        return chosen_variants
    return paced_variants if options.paces else swept_variants


def contenders_of(
    bench: Bench, op: OperatorName, shape: Shape, rotation: Rotation, options: argparse.Namespace
) -> list[Contender]:
    """cuBLAS first."""
    variants = variants_of(options)(op, shape, bench.world)
    mine = [ours(name, variant, rotation, bench.arena) for name, variant in variants]
    return [*others(op, rotation, None if options.alone else bench.arena), *mine]


def rows_of(bench: Bench, op: OperatorName, shape: Shape, options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Check, then time, one row a contender and regime."""
    rotation = rotation_of(shape, seed=shape.m)
    last = (NUM_CALLS - 1) % len(rotation.weights)
    alone, summed = ([truth_of(op, rotation, at, s) for at in (0, last)] for s in (False, op != "gemm"))
    taking_part, graphs, eager_only = contenders_of(bench, op, shape, rotation, options), {}, set[str]()
    for contender in taking_part:
        if contender.name in EAGER_ONLY:
            if not options.no_eager and runs_right(contender, summed[0]):
                eager_only.add(contender.name)
            continue
        graph = checked_graph(op, contender, rotation, alone if contender.name == "cublas" else summed)
        bench.check()
        if graph is not None:
            graphs[contender.name] = graph
    timings = {"graph": measure_graphs(graphs, bench.rounds, bench.host_group)}
    if not options.no_eager and not options.sweep:
        timings["eager"] = eager_timings(bench, taking_part, set(graphs) | eager_only)
    bench.check()
    for regime, found in timings.items():
        floor_ms = bench.floor_ms(op, shape, found["cublas"].ms)
        for contender in taking_part:
            if regime == "graph" and contender.name in EAGER_ONLY:
                continue
            row = row_of(bench, op, shape, contender, found.get(contender.name), floor_ms)
            yield {**row, "regime": regime}


def worker(rank: int, options: argparse.Namespace, port: int) -> None:
    """One rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(options.world))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    started, alone = time.monotonic(), options.world == 1
    bench = Bench(
        arena=None if alone else Arena(256 << 20), world=options.world, link=1e9 if alone else measure_link(),
        host_group=dist.new_group(backend="gloo"), rounds=options.rounds,
    )  # fmt: skip
    common = {
        "link_gbps": round(bench.link / 1e6, 1), "commit": options.commit, "torch": torch.__version__,
        "device": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    for shape in shapes(options):
        late = torch.tensor(float(time.monotonic() - started > options.seconds))
        dist.all_reduce(late, dist.ReduceOp.MAX, group=bench.host_group)
        if late:
            break
        for op in operators(options, shape):
            for row in rows_of(bench, op, shape, options):
                if rank == 0:
                    with options.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps({**row, **common}) + "\n")
        torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


def needed_configs(options: argparse.Namespace) -> list[KernelConfig]:
    """What will be launched, so that it is compiled before, in parallel."""
    variants = variants_of(options)
    found = {
        variant.config: None
        for shape in shapes(options)
        for op in operators(options, shape)
        for _, variant in variants(op, shape, options.world)
    }
    return list(found)


def main(arguments: list[str]) -> None:
    """Compile, start the ranks and wait for them."""
    options = parse(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for _ in warm_up(needed_configs(options), min(30, os.cpu_count() or 1)):
        pass
    mp.spawn(worker, args=(options, 29541), nprocs=options.world)


if __name__ == "__main__":
    main(sys.argv[1:])
