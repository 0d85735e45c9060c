"""Recognises the activation between two products, decomposed or not, by what it computes.

The elementwise nodes between a hidden tensor and its products are one small function of one or two variables. It is
evaluated in float64 at points that tell all known activations apart, from the flat middle out to magnitudes at which
any clamp shows. So every way to write an activation is recognised, and nothing that only looks like one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from mkcompile.ops.collectives import ACTIVATIONS, activate
from mkcompile.passes.graph import VIEWS, is_call, shape_of, value
from mkcompile.passes.sizes import same_shape

CASTS = (torch.ops.prims.convert_element_type.default,)
MAX_NODES = 40
RELATIVE_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Elementwise:
    """A hidden tensor as an elementwise function of its `leaves`; `interior` holds the nodes between, hidden last."""

    hidden: fx.Node
    leaves: tuple[fx.Node, ...]
    interior: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """`hidden = name(gate)`, or `name(gate) * up` where `up` is not None."""

    name: str
    gate: fx.Node
    up: fx.Node | None


def elementwise(hidden: fx.Node, is_leaf: Callable[[fx.Node], bool]) -> Elementwise | None:
    """The elementwise function that ends in `hidden` and starts at leaves; None where something else is in between."""
    leaves: dict[fx.Node, None] = {}
    interior: dict[fx.Node, None] = {}
    pending = [hidden]
    while pending:
        node = pending.pop()
        if node in leaves or node in interior:
            continue
        if is_leaf(node):
            leaves[node] = None
        elif len(interior) < MAX_NODES and _keeps_elements(node):
            interior[node] = None
            # sizes of a view may be nodes too
            pending += node.all_input_nodes[:1] if is_call(node, (*VIEWS, *CASTS)) else reversed(node.all_input_nodes)
        else:
            return None
    return Elementwise(hidden=hidden, leaves=tuple(leaves), interior=tuple(sorted(interior)))


def recognise(function: Elementwise) -> Activation | None:
    """The known activation, plain or gated, that the function is."""
    if function.hidden in function.leaves:
        return None
    if len(function.leaves) == 1:
        (gate,) = function.leaves
        return next((Activation(name=name, gate=gate, up=None) for name in _names(function, [gate])), None)
    if len(function.leaves) == 2:
        for gate, up in (function.leaves, function.leaves[::-1]):
            for name in _names(function, [gate, up]):
                return Activation(name=name, gate=gate, up=up)
    return None


def _keeps_elements(node: fx.Node) -> bool:
    """Does every element of the result depend on the same element of the inputs, and on nothing else?"""
    if is_call(node, VIEWS):
        return True
    if is_call(node, CASTS):
        source = node.args[0]
        # a cast to fewer bits quantises on purpose, a cast up and back down does not
        return isinstance(source, fx.Node) and not _quantises(node, source)
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.pointwise not in node.target.tags or torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    return bool(node.all_input_nodes) and all(_same_shape(node, one) for one in node.all_input_nodes)


def _quantises(cast: fx.Node, source: fx.Node) -> bool:
    return not value(cast).is_floating_point() or value(cast).element_size() < min(2, value(source).element_size())


def _same_shape(node: fx.Node, other: fx.Node) -> bool:
    """Equal shapes, so nothing is broadcast."""
    return isinstance(other.meta.get("val"), Tensor) and same_shape(shape_of(other), shape_of(node))


@cache
def _points() -> tuple[Tensor, Tensor]:
    """Gate and up values in float64."""
    middle = torch.linspace(-12, 12, 193, dtype=torch.float64)
    far = torch.tensor([10.0**e for e in (2, 3, 5, 10, 30)], dtype=torch.float64)
    gate = torch.cat([-far, middle, far])
    return gate, torch.cos(7 * torch.arange(gate.numel(), dtype=torch.float64)) * 3


def _names(function: Elementwise, variables: list[fx.Node]) -> list[str]:
    """The activations that the function equals at all points, with the leaves in this order."""
    with _disable_current_modes(), torch.no_grad():
        found = _evaluate(function, dict(zip(variables, _points(), strict=False)))
        if found is None:
            return []
        expected = _expected(is_gated=len(variables) == 2)
        return [name for name, values in expected.items() if _close(found, values)]


@cache
def _expected(*, is_gated: bool) -> dict[str, Tensor]:
    """All known activations at the points."""
    gate, up = _points()
    plain = {name: activate(gate, name) for name in ACTIVATIONS}
    return {name: values * up for name, values in plain.items()} if is_gated else plain


def _close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=RELATIVE_TOLERANCE, atol=1e-12)


def _evaluate(function: Elementwise, values: dict[fx.Node, Tensor]) -> Tensor | None:
    """The function's value; views and casts change nothing. None where an argument is no constant."""
    for node in function.interior:
        if is_call(node, (*VIEWS, *CASTS)):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            values[node] = values[source]
            continue
        if any(isinstance(arg, fx.Node) and arg not in values for arg in (*node.args, *node.kwargs.values())):
            return None
        args: Any = [values[arg] if isinstance(arg, fx.Node) else arg for arg in node.args]
        kwargs: Any = {key: values[arg] if isinstance(arg, fx.Node) else arg for key, arg in node.kwargs.items()}
        values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return values[function.hidden]
