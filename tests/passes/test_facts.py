"""What is written into plan keys: results that stay in the graph, and calls beside which no collective can run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._inductor import config as inductor_config

from mkcompile.plan import key
from tests.captured import Captured, capture, capture_each
from tests.regions import CopyToRegion, ReduceFromRegion

GROUP, WORLD_SIZE = "0", 2
STAYS, ALONE = {key.STAYS}, {key.ALONE}
pytestmark = pytest.mark.usefixtures("group")


def reduced(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_reduce(x @ w, "sum", GROUP)


def read_by_a_sum(x: Tensor, w: Tensor) -> Tensor:
    return reduced(x, w) + x


def read_through_views(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(reduced(x, w).view(4, 4, 16).transpose(1, 2)).sum()


def read_by_a_product(x: Tensor, w: Tensor) -> Tensor:
    return reduced(x, w) @ w


def returned(x: Tensor, w: Tensor) -> Tensor:
    return reduced(x, w)


def view_returned(x: Tensor, w: Tensor) -> Any:
    y = reduced(x, w)
    return y + 1, y[2:4].t()


def copy_that_may_vanish(x: Tensor, w: Tensor) -> Tensor:
    return reduced(x, w).clone()


def cast_that_may_vanish(x: Tensor, w: Tensor) -> Tensor:
    return reduced(x, w).to(torch.float32)


def updated_in_place(x: Tensor, w: Tensor) -> Tensor:
    return torch.index_put(reduced(x, w), (x[:2, 0].long(),), x[:2])


def communicated(x: Tensor, w: Tensor) -> Tensor:
    return (
        funcol.all_reduce(torch.relu(x), "sum", GROUP)
        + funcol.reduce_scatter_tensor(reduced(x, w), "sum", 0, GROUP).sum()
    )


STAY: tuple[Callable[..., Any], ...] = (read_by_a_sum, read_through_views, read_by_a_product)
LEAVE: tuple[Callable[..., Any], ...] = (
    returned, view_returned, copy_that_may_vanish, cast_that_may_vanish, updated_in_place
)  # fmt: skip


def facts(graph: Captured, operator: str = "gemm_all_reduce") -> list[set[str]]:
    """Of each call of the operator, in graph order."""
    calls = [node for node in graph.after.graph.nodes if str(node.target) == f"mkcompile.{operator}.default"]
    return [set(key.facts_of(node.args[-1])) for node in calls]


def operands() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 16), torch.randn(16, 16)


def test_a_result_stays_unless_it_or_what_may_be_its_memory_leaves() -> None:
    graph, sites = capture_each([*STAY, *LEAVE], *operands())
    assert all(site.operator == "gemm_all_reduce" for site in sites.values())
    assert facts(graph) == [STAYS | ALONE] * len(STAY) + [ALONE] * len(LEAVE)


def test_a_result_that_another_collective_reads_leaves() -> None:
    (graph,) = capture(communicated, *operands())
    assert facts(graph) == [set()], "and it is not alone either"


def test_a_result_that_is_saved_for_backward_leaves() -> None:
    def saved(x: Tensor, w: Tensor) -> Tensor:
        y = ReduceFromRegion.apply(x @ w, 0, GROUP)
        return (y * y).sum()

    x, w = operands()
    forward, _ = capture(saved, x, w.requires_grad_(), backward=True)
    assert facts(forward) == [ALONE]


def test_gradients_inside_a_backward_stay() -> None:
    def two_layers(x: Tensor, w: Tensor) -> Tensor:
        hidden = torch.sigmoid(x * 2)
        return torch.sigmoid(CopyToRegion.apply(hidden, 0, GROUP) @ w)

    x, w = operands()
    _, backward = capture(two_layers, x.requires_grad_(), w.requires_grad_(), backward=True)
    assert facts(backward) == [STAYS | ALONE]


@pytest.mark.parametrize("setting", ["cpp_wrapper", "triton.cudagraphs"])
def test_nothing_stays_where_the_code_does_not_free_what_is_dead(setting: str) -> None:
    with inductor_config.patch({setting: True}):
        (graph,) = capture(read_by_a_sum, *operands())
    assert facts(graph) == [ALONE]


def before_and_after(x: Tensor, w: Tensor) -> Tensor:
    """One collective is waited for before the call, one starts from its result."""
    first = funcol.all_reduce(torch.relu(x), "sum", GROUP)
    return funcol.all_gather_tensor(torch.relu(reduced(first + 1, w)), 0, GROUP)


def beside(x: Tensor, w: Tensor) -> Any:
    """Waited for before the call in the program, but nothing keeps Inductor from waiting later."""
    other = funcol.all_reduce(torch.relu(x), "sum", GROUP) + 1
    return other, reduced(x, w) + x


def waited_for_later(x: Tensor, w: Tensor) -> Tensor:
    pending = torch.ops._c10d_functional.all_reduce(torch.relu(x), "sum", GROUP)
    y = torch.relu(reduced(x, w))
    result: Tensor = y + torch.ops._c10d_functional.wait_tensor(pending)
    return result


@pytest.mark.parametrize(
    ("function", "expected"),
    [(before_and_after, STAYS | ALONE), (beside, STAYS), (waited_for_later, STAYS)],
)
def test_a_call_is_alone_where_no_order_of_the_graph_puts_a_collective_beside_it(
    function: Callable[..., Any], expected: set[str]
) -> None:
    (graph,) = capture(function, *operands())
    assert facts(graph) == [expected]


def test_keys_keep_policy_and_problem() -> None:
    plain = "auto;operator=gemm_all_reduce,n=8"
    marked = key.with_facts(plain, [key.ALONE, key.STAYS])
    assert key.fuse_of(marked) == key.fuse_of(plain) == "auto"
    assert key.facts_of(marked) == {key.ALONE, key.STAYS} and not key.facts_of(plain)
    assert marked.endswith(";operator=gemm_all_reduce,n=8")
    assert not key.facts_of("") and not key.facts_of("stays")
