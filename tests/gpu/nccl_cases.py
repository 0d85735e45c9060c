"""Launches beside NCCL: on one rank its kernel comes first and waits, on the other the fused one; no host waits.

NCCL has a stream of its own, so neither kernel has to end before the other may start. The one that comes second finds
only the SMs that the first has left.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.gpu.pair import Pair
from tests.gpu.stream_cases import ROUNDS, check_all, ready_products


def _beside_nccl(pair: Pair, first: int, num_elements: int) -> dict[str, Any]:
    """Rank `first` gives NCCL its collective before the launch, the other after it."""
    ready = ready_products(pair)
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


CASES = {
    "small_first_on_rank_0": small_first_on_rank_0,
    "large_first_on_rank_0": large_first_on_rank_0,
    "large_first_on_rank_1": large_first_on_rank_1,
}
