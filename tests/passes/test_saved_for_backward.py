"""What torch saves for backward: a collective's input, its result before the wait, one copy for each reader."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes.post_grad import remove_noop_ops
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from mkcompile.passes.fuse import fuse
from mkcompile.passes.graph import VIEWS, peel
from mkcompile.passes.save_reduced import SaveReduced
from tests.captured import Captured, assert_same_values, capture, count

WORLD_SIZE = 2
GROUP = "0"
aten = torch.ops.aten
c10d = torch.ops._c10d_functional
pytestmark = pytest.mark.usefixtures("group")


def _waits_for_each(x: Tensor, weights: list[Tensor], laid_out: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Torch 2.14's form: one collective; a wait, a layout, a view for each linear, and each linear's input saved."""
    begun = c10d.all_gather_into_tensor(x, WORLD_SIZE, GROUP)
    results = []
    for w in weights:
        saved = laid_out(c10d.wait_tensor(begun)).reshape(-1, x.shape[-1])
        results += [saved @ w, saved]
    return results


def _rewritten(function: Callable[..., Any], *args: Tensor) -> Captured:
    before = make_fx(function, tracing_mode="fake")(*args)
    after = copy.deepcopy(before)
    sites = fuse(after.graph)
    remove_noop_ops(after.graph)
    after.graph.lint()
    after.recompile()
    return Captured(phase="forward", before=before, after=after, sites=sites)


def _owner(node: fx.Node) -> fx.Node:
    """The node that made the memory that this one is a view of."""
    return peel(node, tuple(one for one in VIEWS if one is not aten.clone.default))


LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "cats_along_the_middle": (lambda whole: torch.cat(whole.split(whole.shape[0] // WORLD_SIZE), 1), (3, 4, 8)),
    "views_of_one_batch": (lambda whole: whole.reshape(1, -1, 8), (1, 4, 8)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_gather_with_one_saved_copy_for_each_reader_is_fused_and_the_copies_stay_apart(name: str) -> None:
    laid_out, shape = LAYOUTS[name]

    def function(x: Tensor, *weights: Tensor) -> list[Tensor]:
        return _waits_for_each(x, list(weights), laid_out)

    found = _rewritten(function, torch.randn(shape), *(torch.randn(8, 6) for _ in range(3)))
    assert found.operators == Counter(all_gather_gemm=1)
    assert found.calls == Counter(all_gather_gemm=1)
    assert_same_values(found, WORLD_SIZE, tolerance=1e-6)
    clones = found.after.graph.find_nodes(op="call_function", target=aten.clone.default)
    assert len(clones) == 2
    # backward reuses each one's memory on its own
    results: Any = found.after.graph.output_node().args[0]
    saved = {_owner(one) for one in results[1::2]}
    assert len(saved) == 3 and saved >= set(clones)


class _Reduce(torch.autograd.Function):
    """All-reduce forward, nothing backward: the end of a row-parallel linear."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:  # type: ignore[override]
        return funcol.all_reduce(y, "sum", GROUP)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def _tensor_parallel(x: Tensor, w: Tensor) -> Tensor:
    return (x + _Reduce.apply(x @ w)).sin()  # type: ignore[no-any-return, no-untyped-call]


def _sequence_parallel(x: Tensor, w: Tensor) -> Tensor:
    scattered: Tensor = funcol.reduce_scatter_tensor_autograd(x @ w, "sum", 0, GROUP)
    return scattered.sin()


def _checkpointed(
    block: Callable[..., Tensor], saved: Collection[Any], joint: CustomGraphPass | None = None
) -> list[Captured]:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    def function(x: Tensor, w: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(block, x, w, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]

    graphs = capture(function, *(torch.randn(8, 8, requires_grad=True) for _ in range(2)), backward=True, joint=joint)
    for graph in graphs:
        assert_same_values(graph, WORLD_SIZE, tolerance=1e-6)
    return graphs


def _scattered_along_dim_1(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ w).view(2, 4, 8)
    scattered: Tensor = funcol.reduce_scatter_tensor_autograd(y, "sum", 1, GROUP)
    return scattered.sin()


@pytest.mark.parametrize(
    ("block", "operator"),
    [
        (_tensor_parallel, "gemm_all_reduce"),
        (_sequence_parallel, "gemm_reduce_scatter"),
        (_scattered_along_dim_1, "gemm_reduce_scatter"),
    ],
)
def test_instead_of_a_product_the_reduced_tensor_is_saved_and_the_product_fused(
    block: Callable[..., Tensor], operator: str
) -> None:
    forward, backward = _checkpointed(block, {aten.mm.default}, SaveReduced())
    assert forward.operators == Counter([operator])
    reductions = {"all_reduce", "reduce_scatter_tensor"}
    assert reductions.isdisjoint(count(backward.before.graph, "_c10d_functional"))
    saved = [one for one in forward.after.graph.output_node().args[0] if isinstance(one, fx.Node)]  # type: ignore[union-attr]
    assert not any(_owner(one).target is aten.mm.default for one in saved)


def test_a_product_that_backward_needs_itself_stays_saved() -> None:
    def block(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        return (y.sin() + _Reduce.apply(y)).cos()  # type: ignore[no-any-return, no-untyped-call]

    forward, _ = _checkpointed(block, {aten.mm.default}, SaveReduced())
    assert forward.operators == Counter(PRODUCT_USED_ELSEWHERE=1)


def test_pieces_of_no_split_are_left_as_they_are() -> None:
    def block(x: Tensor, w: Tensor) -> Tensor:
        inputs: Tensor = funcol.reduce_scatter_tensor_autograd(torch.cat([x, w]), "sum", 0, GROUP)
        nested = torch.cat([torch.cat([x, w], 1).view(16, 8), w])
        return inputs @ w + funcol.reduce_scatter_tensor_autograd(nested[:16], "sum", 0, GROUP) @ w  # type: ignore[no-any-return]

    forward, _ = _checkpointed(block, {aten.mm.default}, SaveReduced())
    assert forward.operators == Counter(NO_GEMM=2)


def test_a_product_that_checkpointing_saves_is_left_and_its_collective_runs_again() -> None:
    forward, backward = _checkpointed(_tensor_parallel, {aten.mm.default})
    assert forward.operators == Counter(PRODUCT_SAVED=1)
    assert backward.left == Counter(all_reduce=1)


@pytest.mark.parametrize(
    ("block", "collective", "operator"),
    [
        (_tensor_parallel, c10d.all_reduce.default, "gemm_all_reduce"),
        (_sequence_parallel, c10d.reduce_scatter_tensor.default, "gemm_reduce_scatter"),
    ],
    ids=["all_reduce", "reduce_scatter"],
)
def test_a_collective_that_checkpointing_saves_beside_the_products_is_fused(
    block: Callable[..., Tensor], collective: Any, operator: str
) -> None:
    forward, backward = _checkpointed(block, {aten.mm.default, collective})
    assert forward.operators == Counter([operator])
    assert "all_reduce" not in count(backward.before.graph, "_c10d_functional")
