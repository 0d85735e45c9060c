"""Calls whose tensors are graph nodes, evaluated on the nodes' fake values."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import fx

from mkcompile.ops.problem import Problem
from mkcompile.ops.registry import Call


def to_values(arg: Any) -> Any:
    """The argument with every node replaced by its fake value."""
    if isinstance(arg, fx.Node):
        return arg.meta["val"]
    if isinstance(arg, (list, tuple)):
        return [to_values(one) for one in arg]
    return arg


def with_values(call: Call) -> Call:
    """The call on fake values."""
    return type(call)(*(to_values(getattr(call, one.name)) for one in fields(call)))  # type: ignore[arg-type]


def problem_of(call: Call) -> Problem:
    """The problem of a call whose tensors are nodes."""
    return with_values(call).problem()
