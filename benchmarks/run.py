"""`python -m benchmarks.run --op gemm_all_reduce`: every contender at every shape, one JSON line each.

Starts one process a GPU; `--op gemm --world 1` needs but one. A contender whose result is wrong is reported
(`"checked": false`) and not timed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .check import is_right
from .contenders import Operands, contenders, sent_bytes
from .measure import REGIMES, Timing, measure, timed_ms
from .shapes import SHAPES, Shape
from .workspaces import Arena, symmetric_matrix

_ROUNDS = {"burst": 8, "sustained": 5}
_LINK_BYTES = 256 << 20
_OUT = Path("benchmarks/results/2xh200/ops.jsonl")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--op", choices=sorted(SHAPES), action="append", help="may be repeated; default: all")
    parser.add_argument("--shape", type=int, action="append", help="index into the operator's shapes; default: all")
    parser.add_argument("--regime", choices=REGIMES, action="append", help="default: both")
    parser.add_argument("--contender", action="append", help="may be repeated; default: all. cuBLAS takes part always")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--arena-mb", type=int, default=1280)
    parser.add_argument("--commit", default="unknown", help="written into every line")
    parser.add_argument("--out", type=Path, default=_OUT, help="JSON lines are appended")
    return parser.parse_args(arguments)


def measure_link() -> float:
    """Both directions busy. Units: bytes a millisecond."""
    import torch.distributed._symmetric_memory as symm_mem

    group = dist.group.WORLD
    assert group is not None
    rank, world = dist.get_rank(), dist.get_world_size()
    target, _ = symmetric_matrix(1, _LINK_BYTES // 2, torch.bfloat16)
    source = torch.ones_like(target)
    peer = symm_mem.rendezvous(target, group.group_name).get_buffer((rank + 1) % world, target.shape, target.dtype)
    best = 0.0
    for _ in range(5):
        torch.cuda.synchronize()
        dist.barrier()
        slowest = torch.tensor(timed_ms(lambda: peer.copy_(source), 4), device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        best = max(best, _LINK_BYTES / float(slowest))
    return best


def random_operands(op: str, shape: Shape, seed: int) -> Operands:
    """Different on every rank, but for rows that are gathered."""
    generator = torch.Generator(device="cuda").manual_seed(1000 * seed + dist.get_rank())

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device="cuda", generator=generator, dtype=torch.bfloat16)

    if op != "all_gather_gemm":
        return Operands(x=matrix(shape.m, shape.k), w=matrix(shape.n, shape.k))
    shard = matrix(shape.m // dist.get_world_size(), shape.k)
    x = shard.new_empty(shape.m, shape.k)
    dist.all_gather_into_tensor(x, shard)
    return Operands(x=x, w=matrix(shape.n, shape.k))


def rows_of(
    op: str, shape: Shape, options: argparse.Namespace, arena: Arena | None, link: float, seed: int
) -> Iterator[dict[str, object]]:
    """Check, then time; one row a contender and regime. Units: `link` bytes a millisecond.

    `arena`: None where there is one rank.
    """
    wanted = {"cublas", *(options.contender or ())}
    host_group = dist.new_group(backend="gloo")
    operands = random_operands(op, shape, seed)
    everyone, right = contenders(op, shape, operands, arena), {}
    taking_part = [one for one in everyone if one.name in wanted or not options.contender]
    for contender in taking_part:
        right[contender.name] = is_right(op, contender, operands)
        if arena is not None:
            arena.fault.check()
    calls = {contender.name: contender.call for contender in taking_part if right[contender.name]}
    world = dist.get_world_size()
    link_ms = sent_bytes(op, shape, world) / link
    for regime in options.regime or REGIMES:
        expected_us = max(shape.flop / 700e6, link_ms * 1e3)
        timings = measure(calls, regime, expected_us, host_group, _ROUNDS[regime])
        if arena is not None:
            arena.fault.check()
        ceiling_ms = max(timings["cublas"].ms, link_ms)
        for contender in taking_part:
            timing = timings.get(contender.name, Timing(ms=float("nan"), p10=float("nan"), p90=float("nan")))
            yield {
                "op": op, "M": shape.m, "N": shape.n, "K": shape.k, "world": world, "dtype": "bfloat16",
                "contender": contender.name, "ms": round(timing.ms, 5), "p10": round(timing.p10, 5),
                "p90": round(timing.p90, 5), "ceiling_ms": round(ceiling_ms, 5), "link_ms": round(link_ms, 5),
                "checked": right[contender.name], "variant": contender.variant, "regime": regime,
            }  # fmt: skip
    dist.destroy_process_group(host_group)


def worker(rank: int, options: argparse.Namespace, folder: str) -> None:
    """One rank."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=options.world,
        device_id=torch.device("cuda", rank),
    )  # fmt: skip
    arena, link = (Arena(options.arena_mb << 20), measure_link()) if options.world > 1 else (None, float("inf"))
    common = {
        "link_gbps": round(link / 1e6, 1) if arena else None, "commit": options.commit, "torch": torch.__version__,
        "device": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    for op in options.op or sorted(SHAPES):
        for index in options.shape or range(len(SHAPES[op])):
            for row in rows_of(op, SHAPES[op][index], options, arena, link, index):
                if rank == 0:
                    with options.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps({**row, **common}) + "\n")
            torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: list[str]) -> None:
    """Start the ranks and wait for them."""
    options = parse(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.world == 1 and options.op != ["gemm"]:
        raise SystemExit("one rank can only run --op gemm")
    if (found := torch.cuda.device_count()) < options.world:
        raise SystemExit(f"bench ops needs {options.world} CUDA GPUs of the Hopper generation (--world): found {found}")
    with tempfile.TemporaryDirectory(prefix="mkcompile-run-") as folder:
        mp.spawn(worker, args=(options, folder), nprocs=options.world)


if __name__ == "__main__":
    main(sys.argv[1:])
