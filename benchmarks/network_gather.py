"""`python -m benchmarks.network_gather --out FILE`: all-gather GEMMs over two emulated nodes of one GPU each.

One process drives both ranks. Every contender is checked, then all are timed in turn in bursts: the product alone
(cuBLAS), the fused kernel in two tiles, and the sequence that is not fused: the same gather over the same network, then
the product. A row also has the timeline of one traced launch: how long blocks computed, and how long the link was busy.
Shapes: M gathered rows, N columns of a rank, K summed. Units: ms, GB/s.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mkcompile.runtime.gather_launch import GatherSize
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.proxy import Link
from mkcompile.runtime.warmup import warm_up
from tests.gpu.gather_calls import Call
from tests.gpu.network_gather_calls import Movers, make_call
from tests.gpu.network_ranks import LINK_50, SHUFFLED_50, NodeGroup

from .network_bursts import interleaved_ms, timeline_of
from .shapes import GATHERED, Shape

ORDERS = {"in_order": LINK_50, "shuffled": SHUFFLED_50}
TILES = ((128, 256), (128, 128))
LARGE_ROWS = 8192
_GBPS = 50.0
_ROUNDS = 4
_ARENA_BYTES = 1200 << 20


class Nodes:
    """Two ranks and the operands of one shape."""

    def __init__(self, group: NodeGroup, movers: Movers, shape: Shape) -> None:
        self.group, self.movers, self.shape = group, movers, shape
        self.size = GatherSize(segment_rows=shape.m // group.world, k=shape.k, n=(shape.n,), world=group.world)
        self.fused = {tile: self._call(tile, self.size) for tile in TILES}
        narrow = GatherSize(segment_rows=self.size.segment_rows, k=shape.k, n=(8,), world=group.world)
        self.gather = self._call((128, 128), narrow, returned=True)
        self.out = [torch.empty_like(one.outs[0]) for one in self.fused[TILES[0]].tensors]

    def _call(self, tile: tuple[int, int], size: GatherSize, returned: bool = False, trace: bool = False) -> Call:
        config = KernelConfig(operator="all_gather_gemm", network="flat", trace=trace).with_tile(*tile)
        return make_call(self.group, self.movers, config, size, returned=returned)

    def runs(self) -> dict[str, Callable[[int], None]]:
        """What is timed, by name, for one rank on its stream."""
        found: dict[str, Callable[[int], None]] = {"gemm": self._multiply, "unfused": self._unfused}
        for tile, call in self.fused.items():
            found[f"{tile[0]}x{tile[1]}"] = lambda rank, call=call: self._launch(call, rank)  # type: ignore[misc]
        return found

    def _launch(self, call: Call, rank: int) -> None:
        call.prepared[rank].run(None, torch.cuda.current_stream().cuda_stream, False)

    def _multiply(self, rank: int) -> None:
        gathered, one = self.gather.tensors[rank].gathered, self.fused[TILES[0]].tensors[rank]
        assert gathered is not None
        torch.mm(gathered, one.w[0], out=self.out[rank])

    def _unfused(self, rank: int) -> None:
        self._launch(self.gather, rank)
        self._multiply(rank)

    def check(self) -> None:
        """All that is timed gives what it should. Raises: AssertionError."""
        for name, call in (("gather", self.gather), *((str(tile), call) for tile, call in self.fused.items())):
            call.run(self.group)
            self.group.synchronize()
            self.group.check()
            call.check(exact=False, what=name)

    def timeline(self, tile: tuple[int, int]) -> dict[str, Any]:
        """Of one traced launch."""
        call = self._call(tile, self.size, trace=True)
        return timeline_of(self.group, lambda: call.run(self.group))


def measure(group: NodeGroup, movers: Movers, shape: Shape, order: str) -> dict[str, Any]:
    """One row."""
    nodes = Nodes(group, movers, shape)
    nodes.check()
    ms = interleaved_ms(group, nodes.runs(), _ROUNDS)
    group.check()
    tile = min(TILES, key=lambda one: ms[f"{one[0]}x{one[1]}"])
    best, gemm_ms, link_ms = ms[f"{tile[0]}x{tile[1]}"], ms["gemm"], nodes.size.shard_bytes / _GBPS / 1e6
    ceiling_ms = max(gemm_ms, link_ms)
    return {
        "op": "all_gather_gemm", "M": shape.m, "N": shape.n, "K": shape.k, "nodes": group.nodes,
        "transport": "emulated", "order": order, "ms": round(best, 4), "gemm_ms": round(gemm_ms, 4),
        "link_ms": round(link_ms, 4), "ceiling_ms": round(ceiling_ms, 4), "over_ceiling": round(best / ceiling_ms, 3),
        "unfused_ms": round(ms["unfused"], 4), "tile": f"{tile[0]}x{tile[1]}",
        "by_tile": {f"{m}x{n}": round(ms[f"{m}x{n}"], 4) for m, n in TILES}, "timeline": nodes.timeline(tile),
    }  # fmt: skip


def needed_configs() -> list[KernelConfig]:
    """All that is launched, traced and not."""
    bases = [KernelConfig(operator="all_gather_gemm", network="flat", trace=trace) for trace in (False, True)]
    return [base.with_tile(*tile) for base in bases for tile in TILES]


def open_group(link: Link) -> NodeGroup:
    """Two nodes of one GPU."""
    return NodeGroup((0, 1), arena_bytes=_ARENA_BYTES, nodes=2, link=link, timeline_capacity=4096)


def main() -> None:
    """One JSON line a shape and order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    for _ in warm_up(needed_configs(), min(8, os.cpu_count() or 1)):
        pass
    started = time.monotonic()
    for order, link in ORDERS.items():
        group = open_group(link)
        group.record()
        movers = Movers.of(group)
        for shape in (one for one in GATHERED if one.m >= LARGE_ROWS):
            if time.monotonic() - started > options.seconds:
                break
            row = measure(group, movers, shape, order)
            with options.out.open("a", encoding="utf-8") as file:
                device = torch.cuda.get_device_name(0)
                file.write(json.dumps({**row, "device": device, "commit": options.commit}) + "\n")
            torch.cuda.empty_cache()
        group.close()


if __name__ == "__main__":
    main()
