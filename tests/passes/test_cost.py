"""The pass does the same work for each layer, however many there are."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import fx

from benchmarks.llama_graph import example_input, llama
from mkcompile.passes.fuse import fuse
from tests.captured import capture, fake_group

WORLD_SIZE = 4
LAYERS = (1, 4)


def calls_of(graph: fx.Graph) -> int:
    """Calls of functions, Python's and others, while the pass runs: time on a busy machine says nothing."""
    num_calls = 0

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        fuse(graph)
    finally:
        sys.setprofile(None)
    return num_calls


def test_more_layers_cost_no_more_calls_a_node() -> None:
    with fake_group(WORLD_SIZE) as group, torch.no_grad():
        graphs = [capture(llama(n, WORLD_SIZE, group), example_input(WORLD_SIZE))[0].before.graph for n in LAYERS]
        sizes = [len(graph.nodes) for graph in graphs]
        few, many = (calls_of(graph) for graph in graphs)
    assert sizes[1] > 3 * sizes[0]
    assert many / sizes[1] < 1.03 * few / sizes[0]
