"""`python -m benchmarks.network --out FILE`: GEMMs with a reduce-scatter or all-reduce over two emulated nodes.

One process drives both ranks, by default one on each of two GPUs; `--devices 0 0` puts both on one GPU, whose SMs they
share in every contender. Every contender is checked in all tiles, then all are timed in turn in bursts: the product
alone (cuBLAS), the fused kernel in some forms, and the sequence that is not fused: cuBLAS, then the same bytes over the
same network. A row also has the timeline of one traced launch. Shapes: M rows of the product, N columns, K of a rank.
Units: ms, GB/s.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mkcompile.runtime.kernel import PreparedLaunch
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.proxy import Link
from mkcompile.runtime.tile_schedule import TileSchedule
from mkcompile.runtime.warmup import warm_up
from tests.gpu.network_ranks import LINK_50, RING_CAPACITY, SHUFFLED_50, NodeGroup
from tests.gpu.ranks import nan_outputs, random_input
from tests.gpu.test_reductions import expected_of
from tests.gpu.truth import assert_close, summed

from .network_bursts import interleaved_ms, on_each, timeline_of
from .network_unfused import Plain, Unfused, arena_bytes
from .shapes import REDUCED, Shape

ORDERS = {"in_order": LINK_50, "shuffled": SHUFFLED_50}
LARGE_ROWS = 8192
_OPERATORS = (("gemm_reduce_scatter", "none"), ("gemm_all_reduce", "staged"))
_GBPS = 50.0
_ROUNDS = 4
_ARENA_BYTES = 1200 << 20
_LEAST_FLAGS = 16384


@dataclass(frozen=True, slots=True)
class Form:
    """A fused kernel's tile and order: `mixed` own tiles come between the other node's, not after all of them."""

    tile: tuple[int, int]
    mixed: bool = False

    @property
    def name(self) -> str:
        """As rows name it."""
        return f"{self.tile[0]}x{self.tile[1]}{'-mixed' if self.mixed else ''}"


FORMS = (Form((128, 256)), Form((128, 128)), Form((128, 256), mixed=True))


class Nodes:
    """Two ranks and the operands of one shape, in both operators."""

    def __init__(self, group: NodeGroup, plain: Plain, shape: Shape, kind: tuple[str, str]) -> None:
        self.group, self.shape = group, shape
        self.config = KernelConfig(operator=kind[0], broadcast=kind[1], network="flat")  # type: ignore[arg-type]
        sizes = (shape.m, shape.n, shape.k)
        self.inputs = [random_input(rank, device, *sizes, self.config) for rank, device in enumerate(group.devices)]
        rows = shape.m // (2 if self.scatters else 1)
        self.outs = nan_outputs(group, rows, shape.n, self.config)
        self.fused = {form.name: self._launches(form) for form in FORMS}
        self.unfused = Unfused(plain, self.inputs, all_reduce=not self.scatters)

    @property
    def scatters(self) -> bool:
        """Whether a rank keeps its own rows only."""
        return self.config.operator == "gemm_reduce_scatter"

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends."""
        return self.shape.m * self.shape.n * (1 if self.scatters else 2)

    def _launches(self, form: Form, trace: bool = False) -> list[PreparedLaunch]:
        config = replace(self.config, trace=trace).with_tile(*form.tile)
        grid = self.group.max_grid()
        schedule = TileSchedule(grid=grid, lag=1, node_lag=2 * grid if form.mixed else 0)
        return self.group.prepare(config, self.inputs, self.outs, schedule)

    def runs(self) -> dict[str, Callable[[int], None]]:
        """What is timed, by name, for one rank on its stream."""
        found: dict[str, Callable[[int], None]] = {"gemm": self.unfused.multiply, "unfused": self.unfused.run}
        for name, launches in self.fused.items():
            found[name] = lambda rank, launches=launches: run_rank(launches, rank)  # type: ignore[misc]
        return found

    def check(self) -> None:
        """All that is timed gives what it should. Raises: AssertionError."""
        home = f"cuda:{self.group.devices[0]}"
        truth, baseline = summed(self.inputs, self.config, home)
        for name, run in self.runs().items():
            if name == "gemm":
                continue
            for out in self.outs:
                out.fill_(float("nan"))
            self.group.synchronize()
            on_each(self.group, run)
            self.group.synchronize()
            self.group.check()
            self.unfused.group.check()
            for rank, out in enumerate(self.unfused.results if name == "unfused" else self.outs):
                wanted, allowed = (expected_of(self.config, rank, 2, one) for one in (truth, baseline))
                assert_close(out.to(home), wanted, allowed, f"{self.config.operator} {self.shape} {name} rank {rank}")

    def timeline(self, form: Form) -> dict[str, Any]:
        """Of one traced launch."""
        launches = self._launches(form, trace=True)
        return timeline_of(self.group, lambda: self.group.run(launches))


def run_rank(launches: list[PreparedLaunch], rank: int) -> None:
    """On torch's current stream."""
    launches[rank].run(torch.cuda.current_stream().cuda_stream)


def measure(group: NodeGroup, plain: Plain, shape: Shape, kind: tuple[str, str], order: str) -> dict[str, Any]:
    """One row."""
    nodes = Nodes(group, plain, shape, kind)
    nodes.check()
    ms = interleaved_ms(group, nodes.runs(), _ROUNDS)
    group.check()
    plain.group.check()
    form = min(FORMS, key=lambda one: ms[one.name])
    best, gemm_ms, link_ms = ms[form.name], ms["gemm"], nodes.sent_bytes / _GBPS / 1e6
    ceiling_ms = max(gemm_ms, link_ms)
    return {
        "op": kind[0], "M": shape.m, "N": shape.n, "K": shape.k, "nodes": 2, "gpus": len(set(group.devices)),
        "transport": "emulated", "order": order, "ring": group.ring_capacity, "ms": round(best, 4),
        "gemm_ms": round(gemm_ms, 4), "link_ms": round(link_ms, 4), "ceiling_ms": round(ceiling_ms, 4),
        "over_ceiling": round(best / ceiling_ms, 3),
        "unfused_ms": round(ms["unfused"], 4), "form": form.name,
        "by_form": {one.name: round(ms[one.name], 4) for one in FORMS}, "timeline": nodes.timeline(form),
    }  # fmt: skip


def needed_configs() -> list[KernelConfig]:
    """All that is launched, traced and not."""
    bases = [
        KernelConfig(operator=operator, broadcast=broadcast, network="flat", trace=trace)  # type: ignore[arg-type]
        for operator, broadcast in _OPERATORS
        for trace in (False, True)
    ]
    return list(dict.fromkeys(base.with_tile(*form.tile) for base in bases for form in FORMS))


def open_groups(devices: tuple[int, int], link: Link, shapes: list[Shape], ring: int) -> tuple[NodeGroup, Plain]:
    """For the fused kernels, with a workspace of the default size; and for the sequence that is not fused.

    Units: `ring` commands.
    """
    largest = max(arena_bytes(shape.m, shape.n) for shape in shapes)
    tiles = max(
        _LEAST_FLAGS, *(shape.m * shape.n // (form.tile[0] * form.tile[1]) for shape in shapes for form in FORMS)
    )
    group = NodeGroup(
        devices, arena_bytes=_ARENA_BYTES, nodes=2, link=link, timeline_capacity=1 << 17, max_tiles=tiles,
        ring_capacity=ring,
    )  # fmt: skip
    group.record()
    return group, Plain(NodeGroup(devices, arena_bytes=largest, nodes=2, link=link, max_tiles=tiles))


def main() -> None:
    """One JSON line for each operator, shape and order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--devices", type=int, nargs=2, default=[0, 1])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--largest", type=int, default=1 << 28, help="elements of the largest product")
    parser.add_argument("--least", type=int, default=0, help="elements of the smallest product")
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=list(ORDERS))
    parser.add_argument("--ring", type=int, default=RING_CAPACITY, help="commands that a proxy's ring holds; 2^n")
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    for _ in warm_up(needed_configs(), min(8, os.cpu_count() or 1)):
        pass
    started, wrong = time.monotonic(), 0
    shapes = [one for one in REDUCED if one.m >= LARGE_ROWS and options.least <= one.m * one.n <= options.largest]
    for order in options.orders:
        group, plain = open_groups(tuple(options.devices), ORDERS[order], shapes, options.ring)
        for shape, kind in ((shape, kind) for shape in shapes for kind in _OPERATORS):
            if time.monotonic() - started > options.seconds:
                break
            try:
                row = measure(group, plain, shape, kind, order)
            except AssertionError as error:  # the other shapes' times are worth having
                row = {"op": kind[0], "M": shape.m, "N": shape.n, "K": shape.k, "order": order, "error": str(error)}
                wrong += 1
            with options.out.open("a", encoding="utf-8") as file:
                device = torch.cuda.get_device_name(options.devices[0])
                file.write(json.dumps({**row, "device": device, "commit": options.commit}) + "\n")
            torch.cuda.empty_cache()
        group.close()
        plain.group.close()
    sys.exit(wrong != 0)


if __name__ == "__main__":
    main()
