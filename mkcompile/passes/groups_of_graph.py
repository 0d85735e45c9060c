"""The process groups that a graph of Dynamo's communicates over, for their ranks to be asked before it is compiled.

A collective names its group; a DTensor has a mesh, from which its collectives are made later.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._library.fake_class_registry import FakeScriptObject
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from mkcompile.ops.groups import find, resolve
from mkcompile.passes.graph import argument

_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "mkcompile")
_GROUP = ("group_name", "group")
_OF_GRAPH = "torch.compile"
# In the names of torch's functions and methods that make products, whatever they are called with.
_PRODUCTS = re.compile(
    r"mm|matmul|matrix_power|linear|einsum|dot|attention|conv|rnn|lstm|gru|inner|outer|ger|mv|cdist", re.IGNORECASE
)
_OF_TORCH = ("torch", "_operator", "builtins", "math")


def groups_of(graph: fx.GraphModule, required: bool = True) -> list[str]:
    """Names of groups of several ranks, in order; those of the bodies of higher-order operators are among them.

    Raises: GroupError where a collective names a group that this rank does not have, unless they aren't `required`.
    """
    if not dist.is_initialized():
        return []
    nodes = list(_nodes(graph))
    names = {name for node in nodes for name in (*_named(node, required), *_meshes(node))}
    return sorted(name for name in names if _size(name) > 1)


def asked_for(graph: fx.GraphModule, groups: Sequence[str], may_fuse: bool = True) -> list[str]:
    """Of the graph's groups those whose ranks have something to tell each other.

    All, if there may be a product to fuse; else those that a collective names: other ranks may fuse theirs.
    """
    if may_fuse and may_multiply(graph):
        return list(groups)
    named = {name for node in _nodes(graph) for name in _named(node, required=False)}
    return [group for group in groups if group in named]


def may_multiply(graph: fx.GraphModule) -> bool:
    """Could there be a product to fuse? A rank may compile a norm of its shards alone, for its log.

    By names, and True for what only its maker knows: operators that are not torch's own, higher-order ones.
    """
    return any(_may_multiply(node) for node in _nodes(graph))


def _may_multiply(node: fx.Node) -> bool:
    target: Any = node.target
    if node.op == "call_method":
        return _PRODUCTS.search(target) is not None
    if node.op != "call_function":
        return node.op == "call_module"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        name = str(target)
        return not name.startswith(("aten.", "prims.", "_c10d_functional")) or _PRODUCTS.search(name) is not None
    is_of_torch = (getattr(target, "__module__", None) or "torch").split(".")[0] in _OF_TORCH
    return not is_of_torch or _PRODUCTS.search(getattr(target, "__name__", "mm")) is not None


def _nodes(graph: fx.GraphModule) -> Iterator[fx.Node]:
    """Of the graph and of all bodies in it."""
    for body in graph.modules():
        if isinstance(body, fx.GraphModule):
            yield from body.graph.nodes


def _named(node: fx.Node, required: bool) -> Iterator[str]:
    """Groups that a collective names."""
    schema = _schema(node)
    if schema is not None and schema.name.split("::")[0] in _COLLECTIVES:
        positions = [i for i, one in enumerate(schema.arguments) if one.name in _GROUP]
        named = [argument(node, i, schema.arguments[i].name) for i in positions]
        for name in named:
            if isinstance(name, str):
                yield resolve(_OF_GRAPH, name).group_name if required else name


def _meshes(node: fx.Node) -> Iterator[str]:
    """Groups of a DTensor's mesh."""
    for value in tree_leaves(node.meta.get("example_value")):
        if isinstance(value, DTensor):
            yield from (group.group_name for group in mesh_of(value).get_all_groups())


def mesh_of(value: DTensor) -> DeviceMesh:
    """Where a mesh is an opaque object, Dynamo has a fake one in its place (torch 2.13), which keeps the real one."""
    mesh: Any = value.device_mesh
    found: DeviceMesh = object.__getattribute__(mesh, "real_obj") if isinstance(mesh, FakeScriptObject) else mesh
    return found


def _schema(node: fx.Node) -> torch.FunctionSchema | None:
    """Of an operator of torch's, as Dynamo's graphs call it: with its overload or without."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, "default", None)
    return target._schema if isinstance(target, torch._ops.OpOverload) else None


def _size(name: str) -> int:
    """Ranks of the group; 0 where this rank is not in it."""
    try:
        return find(name).size()
    except (RuntimeError, KeyError, ValueError):
        return 0
