"""Readers that see how a tensor lies in memory: what takes its place must lie as it did."""

from __future__ import annotations

from operator import getitem

import torch
from torch import fx

from mkcompile.passes.graph import value
from mkcompile.passes.sizes import Size, same_shape

# Their operators go by sizes, whatever the strides; of others only their makers know.
_BLIND = ("aten", "prims", "_c10d_functional", "mkcompile")
_BY_STRIDES = ("aten::as_strided", "aten::as_strided_scatter", "aten::as_strided_copy")


def same_strides(node: fx.Node, old: fx.Node) -> bool:
    """Known to be equal."""
    return same_shape(tuple(value(node).stride()), tuple(value(old).stride()))


def is_read_by_strides(node: fx.Node) -> bool:
    """Does one of its readers, or of its views' readers, go by strides? The graph's results are Inductor's to keep."""
    for user in node.users:
        if user.op == "output" or not callable(user.target):
            continue
        schema = user.target._schema if isinstance(user.target, torch._ops.OpOverload) else None
        if schema is None:
            # higher-order operators hand tensors to kernels and graphs
            if isinstance(user.target, torch._ops.HigherOrderOperator):
                return True
            if user.target is getitem and is_read_by_strides(user):
                return True
            continue
        if schema.name in _BY_STRIDES or schema.name.split("::")[0] not in _BLIND:
            return True
        if any(one.alias_info is not None for one in schema.returns) and is_read_by_strides(user):
            return True
    return False


def outermost_first(strides: tuple[Size, ...]) -> list[int]:
    """Dimensions in the order in which they lie in memory; symbolic strides by the example that was traced."""
    return sorted(range(len(strides)), key=lambda dim: -_example(strides[dim]))


def _example(size: Size) -> int:
    return size if isinstance(size, int) else int(size.node.hint or 0)
