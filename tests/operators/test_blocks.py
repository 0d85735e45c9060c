"""Exactly which sites are found in whole blocks: DTensor plans, Megatron's autograd functions, collectives by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.captured import Captured, assert_same_values, capture
from tests.models.setting import Setting
from tests.models.zoo import ZOO

WORLD_SIZE = 4
TOLERANCE = 1e-5
pytestmark = pytest.mark.usefixtures("group")

# model: what becomes of the collectives of the forward graph, and of the backward graph
BLOCKS: dict[str, tuple[Counter[str], Counter[str]]] = {
    "dtensor_sp": (
        Counter(all_gather_gemm=1, gemm_reduce_scatter=1, ffn=2),
        Counter(all_gather_gemm=2, gemm_reduce_scatter=2),
    ),
    "dtensor_tp_bias": (Counter(gemm_all_reduce=1, ffn=1), Counter(gemm_all_reduce=2)),
    "megatron_sp": (
        Counter(all_gather_gemm=1, gemm_reduce_scatter=1, ffn=2),
        Counter(all_gather_gemm=2, gemm_reduce_scatter=2),
    ),
    "by_hand": (Counter(ffn=2), Counter(all_gather_gemm=1, gemm_reduce_scatter=1)),
}


def graphs_of(model: str, batch: int, dtype: torch.dtype, trains: bool) -> list[Captured]:
    """The graphs of a model of the zoo."""
    setting = Setting(rank=0, world_size=WORLD_SIZE, rounding=dtype, dtype=dtype, batch=batch, trains=trains)
    instance = ZOO[model](setting)
    given: list[Any] = []

    def note(*args: Any) -> Tensor:
        given.extend(args)
        return torch.zeros(())

    instance.outputs(note)
    with torch.set_grad_enabled(trains):
        return capture(instance.module, *given, backward=trains)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("model", BLOCKS)
def test_every_collective_of_a_block_in_training_is_fused(model: str, batch: int) -> None:
    graphs = graphs_of(model, batch, torch.float32, trains=True)
    assert tuple(graph.operators for graph in graphs) == BLOCKS[model]
    for graph in graphs:
        assert not graph.left
        assert_same_values(graph, WORLD_SIZE, TOLERANCE)


@pytest.mark.parametrize("model", [model for model in BLOCKS if model != "by_hand"])
def test_inference_fuses_what_the_forward_graph_of_training_does(model: str) -> None:
    (graph,) = graphs_of(model, 3, torch.bfloat16, trains=False)
    assert graph.operators == BLOCKS[model][0] and not graph.left
    assert_same_values(graph, WORLD_SIZE, tolerance=2**-5)


def test_functions_that_reduce_gather_and_scatter_by_hand_are_fused_in_inference() -> None:
    (graph,) = graphs_of("by_hand", 3, torch.bfloat16, trains=False)
    assert graph.operators == Counter(ffn=3, all_gather_gemm=1) and not graph.left
    assert_same_values(graph, WORLD_SIZE, tolerance=2**-5)
