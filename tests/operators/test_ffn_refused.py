"""What is no feed-forward network, or none that can be fused. Legend and conventions as in `test_ffn`."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as nnf

from mkcompile.passes import normalise
from mkcompile.passes.ffn import find
from mkcompile.passes.graph import collectives
from mkcompile.passes.reason import Reason
from mkcompile.passes.site import Match, Refusal
from tests.captured import capture
from tests.operators.test_ffn import GROUP, HIDDEN, WORLD_SIZE, Function, inputs, name_of, reduced, scattered
from tests.regions import all_gather

c10d = torch.ops._c10d_functional
pytestmark = pytest.mark.usefixtures("group")


def unknown_activation(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return reduced(nnf.linear(nnf.elu(nnf.linear(x + 1, up[:HIDDEN])), down))


def clamped_gate(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    gate, value = nnf.linear(x + 2, up).chunk(2, -1)
    return reduced(nnf.linear(nnf.silu(gate.clamp(max=7)) * value, down))


def two_inputs(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return reduced(nnf.linear(nnf.silu(nnf.linear(x + 3, up[:HIDDEN])) * nnf.linear(x + 4, up[HIDDEN:]), down))


REFUSED = [
    (unknown_activation, Reason.ACTIVATION_UNKNOWN),
    (clamped_gate, Reason.ACTIVATION_UNKNOWN),
    (two_inputs, Reason.FFN_INPUTS_DIFFER),
]


def interleaved(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    """Gate and value in turn, not one half after the other."""
    both = nnf.linear(x + 5, up)
    return reduced(nnf.linear(nnf.silu(both[..., ::2]) * both[..., 1::2], down))


def value_first(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    value, gate = nnf.linear(x + 6, up).chunk(2, -1)
    return reduced(nnf.linear(nnf.silu(gate) * value, down))


def normalised_hidden(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return reduced(nnf.linear(nnf.softmax(nnf.relu(nnf.linear(x + 7, up[:HIDDEN])), -1), down))


def no_up_product(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return reduced(nnf.linear(nnf.relu(x + 8), up))


def product_of_products(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return reduced(nnf.linear(nnf.linear(x + 9, up[:HIDDEN]), down))


def rows_regrouped(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return reduced(nnf.linear(nnf.relu(nnf.linear(x + 10, up[:HIDDEN])).reshape(4, 16, 6), down[:, :6]))


def scattered_and_kept(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> list[Tensor]:
    """The unreduced product has to exist: as a network it would be computed twice."""
    pieces = nnf.linear(nnf.relu(nnf.linear(x + 11, up[:HIDDEN])), down).chunk(WORLD_SIZE, 1)
    laid_out = c10d.reduce_scatter_tensor(torch.cat(pieces), "sum", WORLD_SIZE, GROUP)
    return [c10d.wait_tensor(laid_out), pieces[0].sum(0)]


NO_NETWORK: list[Function] = [
    interleaved,
    value_first,
    normalised_hidden,
    no_up_product,
    product_of_products,
    rows_regrouped,
]


def found_in(function: Function) -> Match | Refusal | None:
    """What the finder makes of the function's reduction."""
    (graph,) = capture(function, *inputs())
    normalise.run(graph.before.graph)
    *_, reduction = collectives(graph.before.graph)
    return find(reduction)


@pytest.mark.parametrize(("function", "reason"), REFUSED, ids=name_of)
def test_a_network_that_can_not_be_fused_says_why(function: Function, reason: Reason) -> None:
    found = found_in(function)
    assert isinstance(found, Refusal) and found.reason is reason


@pytest.mark.parametrize("function", [*NO_NETWORK, scattered_and_kept], ids=name_of)
def test_what_only_looks_like_a_network_is_none(function: Function) -> None:
    assert found_in(function) is None


@pytest.mark.parametrize("function", [case for case, _ in REFUSED] + NO_NETWORK, ids=name_of)
def test_the_reduction_of_a_refused_network_is_still_fused(function: Function) -> None:
    (graph,) = capture(function, *inputs())
    assert graph.operators == Counter(gemm_all_reduce=1)


def test_a_network_over_two_groups_is_fused_in_parts() -> None:
    pair = dist.new_group([0, 1]).group_name  # type: ignore[union-attr]

    def function(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
        g = all_gather(x, 1, pair)
        return scattered(nnf.linear(nnf.relu(nnf.linear(g, up[:HIDDEN])), down))

    (graph,) = capture(function, *inputs())
    assert graph.operators == Counter(all_gather_gemm=1, gemm_reduce_scatter=1)
    found = found_in(function)
    assert isinstance(found, Refusal) and found.reason is Reason.FFN_GATHER_GROUP
