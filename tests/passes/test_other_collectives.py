"""Collectives that no operator replaces are left alone, each with its reason; so are graphs that differ by rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from mkcompile.passes.reason import Reason
from tests.captured import assert_same_values, capture

WORLD_SIZE = 4
GROUP = "0"
c10d = torch.ops._c10d_functional
pytestmark = pytest.mark.usefixtures("group")


def to_heads(x: Tensor, w: Tensor) -> Tensor:
    """As in Ulysses attention: equal parts."""
    y = x @ w
    return c10d.wait_tensor(c10d.all_to_all_single(y, [2] * WORLD_SIZE, [2] * WORLD_SIZE, GROUP))


def step_of_a_ring(x: Tensor, w: Tensor) -> Tensor:
    """To the next rank, from the one before: other lists of sizes on each rank."""
    return c10d.wait_tensor(c10d.all_to_all_single(x, [0, 0, 0, 8], [0, 8, 0, 0], GROUP)) @ w


def several_at_once(x: Tensor, w: Tensor) -> list[Tensor]:
    return [one + 1 for one in funcol.all_reduce_coalesced([x @ w, x @ w + 1], "sum", GROUP)]


def from_one_rank(x: Tensor, w: Tensor) -> Tensor:
    return funcol.broadcast(x @ w, 0, GROUP) + 1


KINDS: dict[Callable[..., object], Reason] = {
    to_heads: Reason.COLLECTIVE_KIND,
    several_at_once: Reason.COLLECTIVE_KIND,
    from_one_rank: Reason.COLLECTIVE_KIND,
    step_of_a_ring: Reason.RANKS_DIFFER,
}


@pytest.mark.parametrize("function", KINDS, ids=lambda function: function.__name__)
def test_other_collectives_are_left_alone_with_their_reason(function: Callable[..., object]) -> None:
    (graph,) = capture(function, torch.randn(8, 8), torch.randn(8, 8))
    assert [site.reason for site in graph.sites] == [KINDS[function]]
    assert not graph.calls and sum(graph.left.values()) == 1


def test_a_reduction_beside_a_ring_is_fused() -> None:
    """What it is made of is the same on every rank, whichever step of the ring stands before it."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return funcol.all_reduce(step_of_a_ring(x, w) @ w, "sum", GROUP)

    (graph,) = capture(function, torch.randn(8, 8), torch.randn(8, 8))
    assert graph.operators == Counter(RANKS_DIFFER=1, gemm_all_reduce=1)


def test_an_exchange_of_equal_parts_computes_the_same() -> None:
    (graph,) = capture(to_heads, torch.randn(8, 8), torch.randn(8, 8))
    assert_same_values(graph, WORLD_SIZE)
