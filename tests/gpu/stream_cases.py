"""Launches on several streams and groups: one chain on each device, in host order, and nothing hangs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu.pair import KERNELS, Pair, Product

ROUNDS = 50


def _products() -> list[tuple[Product, Product]]:
    """A wide and a narrow launch of each operator, exact, so that one glance tells right from wrong."""
    return [
        (
            Product(operator=operator, rows=1024, n=2048, k=512, integers=True, seed=1),
            Product(operator=operator, rows=96, n=264, k=72, integers=True, seed=2),
        )
        for operator in KERNELS
    ]


def ready_products(
    pair: Pair, products: Sequence[Product] = ()
) -> list[tuple[Product, tuple[Any, ...], tuple[Tensor, Tensor]]]:
    """Products with operands and expected results; each has been launched once, so that all kernels are loaded."""
    ready = []
    for product in products or [one for both in _products() for one in both]:
        operands = product.inputs(pair, pair.rank)
        expected = product.expected(pair)
        product.check(pair, product.call(pair, *operands), expected)
        ready.append((product, operands, expected))
    pair.meet()
    return ready


def check_all(outs: list[tuple[int, Tensor]], ready: list[tuple[Product, Any, tuple[Tensor, Tensor]]]) -> int:
    for index, out in outs:
        wrong = int((out.float() != ready[index][2][0]).sum())
        assert wrong == 0, f"{ready[index][0].name}: {wrong} elements differ"
    return len(outs)


def side_streams(pair: Pair) -> dict[str, Any]:
    """Launches take turns on three streams that nothing else orders."""
    ready = ready_products(pair)
    streams = [torch.cuda.Stream() for _ in range(3)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    outs: list[tuple[int, Tensor]] = []
    for i in range(ROUNDS * len(ready)):
        index = i % len(ready)
        product, operands, _ = ready[index]
        with torch.cuda.stream(streams[(i * 7 + i // 5) % 3]):
            outs.append((index, product.call(pair, *operands)))
    torch.cuda.synchronize()
    return {"launches": check_all(outs, ready)}


def two_groups(pair: Pair) -> dict[str, Any]:
    """Two groups of the same ranks, each with a workspace of its own, on two streams at once."""
    ready = ready_products(pair)
    other = dist.new_group([0, 1], device_id=pair.device)
    names = (pair.group, other.group_name)
    streams = [torch.cuda.Stream() for _ in names]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    outs: list[tuple[int, Tensor]] = []
    for i in range(2 * ROUNDS):
        which, index = (i // 3) % 2, i % len(ready)
        product, operands, _ = ready[index]
        with torch.cuda.stream(streams[which]):
            outs.append((index, product.call(pair, *operands, group=names[which])))
    torch.cuda.synchronize()
    assert pair.launcher.workspace(names[0], pair.device) is not pair.launcher.workspace(names[1], pair.device)
    return {"launches": check_all(outs, ready)}


CASES = {
    "side_streams": side_streams,
    "two_groups": two_groups,
}
