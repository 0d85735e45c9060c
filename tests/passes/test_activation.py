"""Activations are recognised by what they compute: in every form that torch decomposes them into, and in no other."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional

from mkcompile.passes.activation import Activation, elementwise, recognise
from tests.captured import capture, fake_group

aten = torch.ops.aten
Function = Callable[[Tensor], Tensor]

KNOWN: dict[str, tuple[str, Function]] = {
    "relu": ("relu", functional.relu),
    "clamp_min": ("relu", lambda x: x.clamp_min(0)),
    "clamp": ("relu", lambda x: x.clamp(min=0.0)),
    "relu_power": ("relu2", lambda x: functional.relu(x) ** 2),
    "relu_squared": ("relu2", lambda x: functional.relu(x).square()),
    "relu_times_relu": ("relu2", lambda x: functional.relu(x) * functional.relu(x)),
    "gelu": ("gelu", functional.gelu),
    "gelu_by_hand": ("gelu", lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))),
    "gelu_tanh": ("gelu_tanh", lambda x: functional.gelu(x, approximate="tanh")),
    "gelu_megatron": ("gelu_tanh", lambda x: 0.5 * x * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))),
    "gelu_power": ("gelu_tanh", lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
    "silu": ("silu", functional.silu),
    "silu_by_hand": ("silu", lambda x: x * torch.sigmoid(x)),
    "silu_division": ("silu", lambda x: x / (1 + torch.exp(-x))),
    "silu_in_float32": ("silu", lambda x: functional.silu(x.float()).to(x.dtype)),
}

UNKNOWN: dict[str, Function] = {
    "identity": lambda x: x * 1.0,
    "relu6": lambda x: x.clamp(0, 6),
    "clamp_far_out": lambda x: functional.silu(x).clamp(max=60000.0),
    "leaky_relu": functional.leaky_relu,
    "hardswish": functional.hardswish,
    "elu": functional.elu,
    "mish": functional.mish,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "swish_beta": lambda x: x * torch.sigmoid(1.01 * x),
    "gelu_scaled": lambda x: functional.gelu(x) * 1.001,
    "relu_cubed": lambda x: functional.relu(x) ** 3,
    "nan_where_large": lambda x: x * torch.exp(x) / (1 + torch.exp(x)),
    "quantised": lambda x: functional.silu(x.to(torch.float8_e4m3fn).to(x.dtype)),
    "through_integers": lambda x: functional.relu(x.to(torch.int32).to(x.dtype)),
    "noise": lambda x: functional.relu(x + torch.rand_like(x)),
    "normalised": lambda x: functional.silu(x - x.mean(-1, keepdim=True)),
    "broadcast": lambda x: functional.silu(x) * x[:1],
}

VARIANTS: dict[str, Callable[[Function], Callable[[Tensor, Tensor], Tensor]]] = {
    "plain": lambda act: lambda gate, up: act(gate),
    "gated": lambda act: lambda gate, up: act(gate) * up,
    "gated_up_first": lambda act: lambda gate, up: up * act(gate),
    "behind_views": lambda act: lambda gate, up: (act(gate.view(2, 4, 16)) * up.view(2, 4, 16)).view(8, 16),
}


def _ends(functions: list[Callable[[Tensor, Tensor], Tensor]], dtype: torch.dtype) -> list[fx.Node]:
    """The node that each function ends in, all captured in one graph with the placeholders gate and up."""
    with fake_group(2), torch.no_grad():
        inputs = [torch.randn(8, 16, dtype=dtype) for _ in range(2)]
        (captured,) = capture(lambda gate, up: [function(gate, up) for function in functions], *inputs)
    ends: list[fx.Node] = list(captured.before.graph.output_node().args[0])  # type: ignore[arg-type]
    assert len(ends) == len(functions)
    return ends


def _recognised(end: fx.Node) -> Activation | None:
    found = elementwise(end, lambda node: node.op == "placeholder")
    return None if found is None else recognise(found)


@pytest.mark.parametrize(
    ("variant", "dtype"), [*((name, torch.bfloat16) for name in VARIANTS), ("gated", torch.float32)]
)
def test_every_form_of_an_activation_is_recognised(variant: str, dtype: torch.dtype) -> None:
    ends = _ends([VARIANTS[variant](act) for _, act in KNOWN.values()], dtype)
    found = {name: _recognised(end) for name, end in zip(KNOWN, ends, strict=True)}
    assert {name: one and one.name for name, one in found.items()} == {name: act for name, (act, _) in KNOWN.items()}
    gates = {one.gate.name for one in found.values() if one}
    ups = {one.up.name if one.up else None for one in found.values() if one}
    assert (gates, ups) == ({"arg0_1"}, {None} if variant == "plain" else {"arg1_1"})


@pytest.mark.parametrize("variant", ["plain", "gated"])
def test_functions_that_only_look_like_activations_are_not_recognised(variant: str) -> None:
    ends = _ends([VARIANTS[variant](function) for function in UNKNOWN.values()], torch.bfloat16)
    found = {name: _recognised(end) for name, end in zip(UNKNOWN, ends, strict=True)}
    assert {name: one.name for name, one in found.items() if one} == {}


def test_a_product_of_two_activations_is_no_gated_activation() -> None:
    (end,) = _ends([lambda gate, up: functional.silu(gate) * functional.silu(up)], torch.float32)
    assert _recognised(end) is None


def test_operators_that_nothing_decomposed_are_recognised() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    calls = {"silu": graph.call_function(aten.silu.default, (x,))}
    calls["gelu"] = graph.call_function(aten.gelu.default, (x,))
    calls["gelu_tanh"] = graph.call_function(aten.gelu.default, (x,), {"approximate": "tanh"})
    for node in graph.nodes:
        node.meta["val"] = torch.empty(4, 8, device="meta")
    found = {name: _recognised(node) for name, node in calls.items()}
    assert {name: one and one.name for name, one in found.items()} == {name: name for name in calls}


def test_a_long_chain_is_given_up() -> None:
    def long(gate: Tensor, up: Tensor) -> Tensor:
        for _ in range(100):
            gate = gate * 1.01
        return functional.relu(gate)

    (end,) = _ends([long], torch.float32)
    assert elementwise(end, lambda node: node.op == "placeholder") is None
