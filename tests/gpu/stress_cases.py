"""Thousands of launches back to back with no host sync, while each rank is held up at random."""

from __future__ import annotations

import random
import time
from typing import Any

import torch

from mkcompile.runtime.abi import WorkspaceHeader
from tests.gpu.pair import KERNELS, Pair, Product

LAUNCHES = 10_000
# Where ranks share a GPU each launch takes some of the driver's turns.
LAUNCHES_BY_TURNS = 500


def back_to_back(pair: Pair) -> dict[str, Any]:
    """Shapes and operators alternate on one workspace; results are compared on the device, all of them."""
    shapes = ((96, 264, 72), (300, 520, 136), (64, 64, 64), (1000, 1032, 264))
    products = [
        Product(operator=KERNELS[i % 2], rows=rows, n=n, k=k, integers=True, seed=i)
        for i, (rows, n, k) in enumerate(shapes)
    ]
    ready = [(one, one.inputs(pair, pair.rank), one.expected(pair)[0].to(one.dtype)) for one in products]
    for product, operands, _ in ready:
        product.call(pair, *operands)
    pair.meet()
    before = _epoch(pair)
    wrong = torch.zeros((), dtype=torch.int64, device=pair.device)
    skew = random.Random(pair.rank + 1)
    launches = LAUNCHES_BY_TURNS if pair.shares_device else LAUNCHES
    started = time.monotonic()
    for i in range(launches):
        product, operands, expected = ready[i % len(ready)]
        if skew.random() < 0.02:
            torch.cuda._sleep(int(skew.random() * 500_000))
        wrong += (product.call(pair, *operands) != expected).sum()
    torch.cuda.synchronize()
    seconds = time.monotonic() - started
    pair.meet()
    assert int(wrong) == 0, f"{int(wrong)} elements differ"
    assert _epoch(pair) - before == launches, "launches that did not count"
    return {"launches": launches, "seconds": round(seconds, 2)}


def _epoch(pair: Pair) -> int:
    memory = pair.launcher.workspace(pair.group, pair.device).buffer.keep[1]
    header = WorkspaceHeader.from_buffer_copy(bytes(memory[:512].cpu().tolist()))
    assert header.abort == 0 and header.blocks_in == 0
    return int(header.epoch)


CASES = {"back_to_back": back_to_back}
