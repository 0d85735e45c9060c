"""Launches on several streams and groups: one chain on each device, in host order, and nothing hangs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu.pair import Pair
from tests.gpu.ready_calls import Ready, check_all, ready_gathers, ready_products

ROUNDS = 50
# Where ranks share a GPU each launch takes some of the driver's turns.
ROUNDS_BY_TURNS = 10


def _rounds(pair: Pair) -> int:
    return ROUNDS_BY_TURNS if pair.shares_device else ROUNDS


def _on_streams(pair: Pair, ready: Sequence[Ready]) -> dict[str, Any]:
    streams = [torch.cuda.Stream() for _ in range(3)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    outs: list[tuple[Ready, Tensor]] = []
    for i in range(_rounds(pair) * len(ready)):
        one = ready[i % len(ready)]
        with torch.cuda.stream(streams[(i * 7 + i // 5) % 3]):
            outs.append((one, one.run()))
    torch.cuda.synchronize()
    pair.launcher.check()
    return {"launches": check_all(outs)}


def side_streams(pair: Pair) -> dict[str, Any]:
    """Launches take turns on three streams that nothing else orders."""
    return _on_streams(pair, ready_products(pair))


def gathers_on_side_streams(pair: Pair) -> dict[str, Any]:
    """Every variant of gathers, and reductions in between: the copy engine's transfers have a stream of their own."""
    return _on_streams(pair, [*ready_products(pair), *ready_gathers(pair)])


def two_groups(pair: Pair) -> dict[str, Any]:
    """Two groups of the same ranks, each with a workspace of its own, on two streams at once; all operators."""
    other = dist.new_group([0, 1], device_id=pair.device)
    names = (pair.group, other.group_name)
    ready = [[*ready_products(pair, group=name), *ready_gathers(pair, group=name)] for name in names]
    streams = [torch.cuda.Stream() for _ in names]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    outs: list[tuple[Ready, Tensor]] = []
    for i in range(8 * _rounds(pair)):
        which = (i // 3) % 2
        one = ready[which][i % len(ready[which])]
        with torch.cuda.stream(streams[which]):
            outs.append((one, one.run()))
    torch.cuda.synchronize()
    pair.launcher.check()
    assert pair.launcher.workspace(names[0], pair.device) is not pair.launcher.workspace(names[1], pair.device)
    return {"launches": check_all(outs)}


CASES = {
    "side_streams": side_streams,
    "gathers_on_side_streams": gathers_on_side_streams,
    "two_groups": two_groups,
}
