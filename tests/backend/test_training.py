"""What models do around a compiled region: each compared with eager in values and gradients, on two ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.backend.calls import ALWAYS, Compared, Layer, compare, same_on_all
from tests.spawn import Outcomes, run_cases

compiled_by_us = partial(torch.compile, backend="mkernel", fullgraph=True, options=ALWAYS)


def leaf(*shape: int) -> Tensor:
    """A new input that wants its gradient, which is what the backward's all-reduce is for."""
    return same_on_all(*shape).requires_grad_()


def training(rank: int, world_size: int) -> Compared:
    layer = Layer()
    return compare(layer, lambda: [layer(leaf(8, 16))], lambda: [compiled_by_us(layer)(leaf(8, 16))])


def three_dimensions(rank: int, world_size: int) -> Compared:
    layer, x = Layer(), same_on_all(2, 4, 16)
    return compare(layer, lambda: [layer(x)], lambda: [compiled_by_us(layer)(x)])


def full_checkpoint(rank: int, world_size: int) -> Compared:
    layer = Layer()

    def call(x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=False)

    return compare(layer, lambda: [call(leaf(8, 16))], lambda: [compiled_by_us(call)(leaf(8, 16))])


def selective_checkpoint(rank: int, world_size: int) -> Compared:
    layer = Layer()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saves = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)

    def call(x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)

    return compare(layer, lambda: [call(leaf(8, 16))], lambda: [compiled_by_us(call)(leaf(8, 16))])


def no_grad(rank: int, world_size: int) -> Compared:
    layer, x = Layer(), same_on_all(8, 16)
    with torch.no_grad():
        return compare(layer, lambda: [layer(x)], lambda: [compiled_by_us(layer)(x)])


def autocast(rank: int, world_size: int) -> Compared:
    layer, x = Layer(), same_on_all(8, 16)

    def call(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)

    return compare(layer, lambda: [call(x)], lambda: [compiled_by_us(call)(x)])


def retain_graph(rank: int, world_size: int) -> Compared:
    layer, x = Layer(), same_on_all(8, 16)

    def twice(call: Any) -> list[Tensor]:
        y = call(x)
        y.sum().backward(retain_graph=True)
        return [y]

    return compare(layer, lambda: twice(layer), lambda: twice(compiled_by_us(layer)))


def several_blocks(rank: int, world_size: int) -> Compared:
    model, x = nn.Sequential(Layer(hidden=24), Layer(hidden=32)), same_on_all(8, 16)
    first, second = compiled_by_us(model[0]), compiled_by_us(model[1])
    return compare(model, lambda: [model(x)], lambda: [second(first(x))])


def layer_by_layer(rank: int, world_size: int) -> Compared:
    model, x = nn.Sequential(*(Layer() for _ in range(3))), same_on_all(8, 16)

    def compiled() -> list[Tensor]:
        for layer in model:
            layer.compile(backend="mkernel", options=ALWAYS)
        return [model(x)]

    return compare(model, lambda: [model(x)], compiled)


def dynamic_rows(rank: int, world_size: int) -> Compared:
    layer, inputs = Layer(), [same_on_all(rows, 16) for rows in (8, 12, 20)]
    call = compiled_by_us(layer, dynamic=True)
    return compare(layer, lambda: [layer(x) for x in inputs], lambda: [call(x) for x in inputs])


def dynamic_rows_no_grad(rank: int, world_size: int) -> Compared:
    layer, inputs = Layer(), [same_on_all(2, rows, 16) for rows in (8, 12, 20)]
    call = compiled_by_us(layer, dynamic=True)
    with torch.no_grad():
        return compare(layer, lambda: [layer(x) for x in inputs], lambda: [call(x) for x in inputs])


# How many fused operators run: one for each layer, and one more where its input wants a gradient.
CALLS = {
    training: 2,
    three_dimensions: 1,
    full_checkpoint: 2,
    selective_checkpoint: 2,  # the policy saves the product; what it is reduced to is saved in its place
    no_grad: 1,
    autocast: 1,
    retain_graph: 1,
    several_blocks: 3,
    layer_by_layer: 5,
    dynamic_rows: 3,
    dynamic_rows_no_grad: 3,
}
NAMES = {case.__name__: count for case, count in CALLS.items()}
BFLOAT16 = ("autocast",)


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return run_cases({case.__name__: case for case in CALLS}, 2, timeout_s=570.0)


@pytest.mark.parametrize("name", NAMES)
def test_equals_eager_and_is_fused(outcomes: Outcomes, name: str) -> None:
    for rank in outcomes.values(name):
        assert rank.worst < (0.05 if name in BFLOAT16 else 1e-4)
        assert len(rank.groups) == NAMES[name]
