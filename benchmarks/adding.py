"""`python -m benchmarks.adding`: a reduction that its kernel adds to a residual, beside the kernel with a sum behind
it and beside the kernel alone. Two GPUs, one JSON line a contender, shape and regime.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import mkcompile  # registers the operators and installs the launcher
from mkcompile.plan import key

from .measure import REGIMES, measure
from .shapes import Shape

OPERATORS = ("gemm_all_reduce", "gemm_reduce_scatter")
SHAPES = tuple(Shape(m, 8192, k) for m in (2048, 16384) for k in (1024, 3584))
_ROUNDS = {"burst": 9, "sustained": 6}


def parse(arguments: list[str]) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adding", description=__doc__)
    parser.add_argument("--commit", default="unknown", help="written into every line")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended")
    return parser.parse_args(arguments)


def contenders(operator: str, shape: Shape) -> dict[str, Callable[[], object]]:
    """After a check that both ways of adding give the same bits."""
    world, ops = dist.get_world_size(), torch.ops.mkcompile
    generator = torch.Generator(device="cuda").manual_seed(dist.get_rank())

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device="cuda", generator=generator, dtype=torch.bfloat16)

    x, w = matrix(shape.m, shape.k), matrix(shape.n, shape.k).t()
    rows = shape.m if operator == "gemm_all_reduce" else shape.m // world
    residual, twin = matrix(rows, shape.n), torch.empty(rows, shape.n, device="cuda", dtype=torch.bfloat16)
    plan_key = key.with_facts("always;by hand", [key.ALONE])  # with the SMs that a compiled graph without others has
    end = "sum", world, dist.group.WORLD.group_name, plan_key  # type: ignore[union-attr]
    scattered = ([shape.m, shape.n], 0) if operator == "gemm_reduce_scatter" else ()
    store, add = getattr(ops, operator).default, getattr(ops, f"{operator}_add").default
    arguments = [x], [w], None, *scattered, *end

    def added() -> None:
        add(residual, *arguments)

    twin.copy_(residual).add_(store(*arguments))
    added()
    assert torch.equal(residual, twin), f"{operator} {shape}: other bits"
    return {
        "kernel": lambda: store(*arguments),
        "kernel, then add": lambda: twin.add_(store(*arguments)),
        "kernel adds": added,
    }


def worker(rank: int, options: argparse.Namespace, folder: str) -> None:
    """One rank."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, device_id=torch.device("cuda", rank)
    )
    host_group = dist.new_group(backend="gloo")
    common = {"commit": options.commit, "torch": torch.__version__, "device": torch.cuda.get_device_name()}
    for operator in OPERATORS:
        for shape in SHAPES:
            calls = contenders(operator, shape)
            for regime in REGIMES:
                timings = measure(calls, regime, shape.flop / 600e6, host_group, _ROUNDS[regime])
                mkcompile.check()
                for name, timing in timings.items():
                    line = {
                        "op": operator, "M": shape.m, "N": shape.n, "K": shape.k, "contender": name, "regime": regime,
                        "ms": round(timing.ms, 5), "p10": round(timing.p10, 5), "p90": round(timing.p90, 5), **common,
                    }  # fmt: skip
                    if rank == 0:
                        with options.out.open("a", encoding="utf-8") as file:
                            file.write(json.dumps(line) + "\n")
            calls.clear()
            torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: list[str]) -> None:
    """Start the ranks and wait for them."""
    options = parse(arguments)
    if (found := torch.cuda.device_count()) < 2:
        raise SystemExit(f"bench adding needs two CUDA GPUs of the Hopper generation: found {found}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mkcompile-adding-") as folder:
        mp.spawn(worker, args=(options, folder), nprocs=2)


if __name__ == "__main__":
    main(sys.argv[1:])
