"""Launches beside NCCL: on one rank its kernel comes first and waits, on the other the fused one; no host waits.

NCCL has a stream of its own, so neither kernel has to end before the other may start. The one that comes second finds
only the SMs that the first has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.gpu.pair import Pair, Product
from tests.gpu.stream_cases import ROUNDS, check_all, ready_products

#: Launches that leave no SM to others.
FEW_ROWS = tuple(
    Product(operator=operator, rows=rows, n=8192, k=1024, integers=True, seed=9)
    for operator, rows in (("gemm_all_reduce", 64), ("gemm_reduce_scatter", 32), ("gemm_all_reduce", 256))
)


def _beside_nccl(pair: Pair, first: int, num_elements: int, products: Sequence[Product] = ()) -> dict[str, Any]:
    """Rank `first` gives NCCL its collective before the launch, the other after it."""
    ready = ready_products(pair, products)
    payloads = [torch.ones(num_elements, device=pair.device) for _ in range(ROUNDS)]
    dist.all_reduce(torch.ones_like(payloads[0]))
    pair.meet()
    beside = torch.cuda.Stream()
    outs, works = [], []

    def collective(index: int) -> None:
        with torch.cuda.stream(beside):
            works.append(dist.all_reduce(payloads[index], async_op=True))

    for i in range(ROUNDS):
        index = i % len(ready)
        product, operands, _ = ready[index]
        if pair.rank == first:
            collective(i)
        outs.append((index, product.call(pair, *operands)))
        if pair.rank != first:
            collective(i)
    for work in works:
        assert work is not None
        work.wait()
    torch.cuda.synchronize()
    assert all(bool((payload == 2).all()) for payload in payloads)
    return {"launches": check_all(outs, ready)}


def small_first_on_rank_0(pair: Pair) -> dict[str, Any]:
    """One or two blocks of NCCL."""
    return _beside_nccl(pair, first=0, num_elements=1024)


def large_first_on_rank_0(pair: Pair) -> dict[str, Any]:
    """As many blocks as NCCL takes."""
    return _beside_nccl(pair, first=0, num_elements=8 << 20)


def large_first_on_rank_1(pair: Pair) -> dict[str, Any]:
    """The other way round."""
    return _beside_nccl(pair, first=1, num_elements=8 << 20)


def few_rows_first_on_rank_0(pair: Pair) -> dict[str, Any]:
    """Streaming kernels on all SMs."""
    return _beside_nccl(pair, first=0, num_elements=8 << 20, products=FEW_ROWS)


def few_rows_first_on_rank_1(pair: Pair) -> dict[str, Any]:
    """The other way round."""
    return _beside_nccl(pair, first=1, num_elements=8 << 20, products=FEW_ROWS)


CASES = {
    "few_rows_first_on_rank_0": few_rows_first_on_rank_0,
    "few_rows_first_on_rank_1": few_rows_first_on_rank_1,
    "small_first_on_rank_0": small_first_on_rank_0,
    "large_first_on_rank_0": large_first_on_rank_0,
    "large_first_on_rank_1": large_first_on_rank_1,
}
