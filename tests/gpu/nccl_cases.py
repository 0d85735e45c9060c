"""Launches beside NCCL: on one rank its kernel comes first and waits, on the other the fused one; no host waits.

NCCL has a stream of its own, so neither kernel has to end before the other may start. The one that comes second finds
only the SMs that the first has left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tests.gpu.pair import Pair, Product
from tests.gpu.ready_calls import Ready, check_all, ready_gathers, ready_products
from tests.gpu.stream_cases import ROUNDS

#: Launches that leave no SM to others.
FEW_ROWS = tuple(
    Product(operator=operator, rows=rows, n=8192, k=1024, integers=True, seed=9)
    for operator, rows in (("gemm_all_reduce", 64), ("gemm_reduce_scatter", 32), ("gemm_all_reduce", 256))
)
#: Of NCCL's all-reduce: one or two blocks, and as many as it takes.
SMALL, LARGE = 1024, 8 << 20


def _beside_nccl(pair: Pair, ready: Sequence[Ready], first: int, num_elements: int) -> dict[str, Any]:
    """Rank `first` gives NCCL its collective before the launch, the other after it."""
    payloads = [torch.ones(num_elements, device=pair.device) for _ in range(max(ROUNDS, 5 * len(ready)))]
    dist.all_reduce(torch.ones_like(payloads[0]))
    pair.meet()
    beside = torch.cuda.Stream()
    outs, works = [], []

    def collective(index: int) -> None:
        with torch.cuda.stream(beside):
            works.append(dist.all_reduce(payloads[index], async_op=True))

    for i in range(len(payloads)):
        one = ready[i % len(ready)]
        if pair.rank == first:
            collective(i)
        outs.append((one, one.run()))
        if pair.rank != first:
            collective(i)
    for work in works:
        assert work is not None
        work.wait()
    torch.cuda.synchronize()
    pair.launcher.check()
    assert all(bool((payload == 2).all()) for payload in payloads)
    return {"launches": check_all(outs)}


def _products(pair: Pair, first: int, num_elements: int) -> dict[str, Any]:
    return _beside_nccl(pair, ready_products(pair), first, num_elements)


def _few_rows(pair: Pair, first: int, num_elements: int) -> dict[str, Any]:
    """Streaming kernels on all SMs."""
    return _beside_nccl(pair, ready_products(pair, FEW_ROWS), first, num_elements)


def _gathers(pair: Pair, first: int, num_elements: int) -> dict[str, Any]:
    """By every variant."""
    return _beside_nccl(pair, ready_gathers(pair), first, num_elements)


CASES: dict[str, Callable[[Pair], dict[str, Any]]] = {
    f"{name}_first_on_rank_{first}": partial(case, first=first, num_elements=num_elements)
    for name, case, num_elements in (
        ("few_rows", _few_rows, LARGE), ("small", _products, SMALL), ("large", _products, LARGE),
        ("gathers_small", _gathers, SMALL), ("gathers", _gathers, LARGE),
    )
    for first in (0, 1)
}  # fmt: skip
