"""A graph as plain data: what is left of it once the compiler has gone on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import torch
from torch import fx

from mkcompile.passes.graph import GEMMS, VIEWS, WAIT, aten, is_call, is_collective, is_in_place

Role = Literal["input", "output", "gemm", "collective", "wait", "view", "fused", "attention", "other"]

_GEMM_LIKE = (*GEMMS, aten.bmm.default, aten.baddbmm.default, aten._grouped_mm.default, aten._scaled_mm.default)
_VIEW_LIKE = (*VIEWS, aten.permute.default, aten.expand.default, aten.slice.Tensor, aten.unsqueeze.default)
_SHORT_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64", "int64": "i64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node: its name, call, inputs by name, and the site it belongs to (None: to no site).

    `sizes` are the result's sizes as numbers (a symbolic one as in the example), `contracted` a GEMM's k.
    Units: `flops` floating-point operations (GEMMs and attention); `result_bytes` bytes.
    """

    name: str
    role: Role
    call: str
    arguments: str
    inputs: tuple[str, ...]
    shape: tuple[str, ...]
    dtype: str
    sizes: tuple[int, ...] = ()
    contracted: int = 0
    flops: int = 0
    result_bytes: int = 0
    site: int | None = None

    @property
    def value(self) -> str:
        """`bf16[2, 512, 8192]`, or an empty string for what is not a tensor."""
        return f"{self.dtype}[{', '.join(self.shape)}]" if self.dtype else ""

    def __str__(self) -> str:
        left = f"{self.name}: {self.value}" if self.value else self.name
        return f"{left} = {self.call}({self.arguments})"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphView:
    """A graph in order."""

    nodes: tuple[NodeView, ...]

    def __str__(self) -> str:
        return "\n".join(str(node) for node in self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def names(self) -> set[str]:
        """The names of all nodes."""
        return {node.name for node in self.nodes}

    def coloured(self, site_of: dict[str, int]) -> GraphView:
        """The same graph with nodes assigned to sites."""
        return GraphView(nodes=tuple(replace(node, site=site_of.get(node.name)) for node in self.nodes))


def short_dtype(dtype: torch.dtype) -> str:
    """`bf16` for `torch.bfloat16`."""
    name = str(dtype).removeprefix("torch.")
    return _SHORT_DTYPES.get(name, name)


def take(graph: fx.Graph) -> GraphView:
    """The graph as it is now."""
    return GraphView(nodes=tuple(_view(node) for node in graph.nodes))


def _view(node: fx.Node) -> NodeView:
    val = node.meta.get("val")
    tensor = val if isinstance(val, torch.Tensor) else None
    return NodeView(
        name=node.name,
        role=_role(node),
        call=_call(node),
        arguments=_arguments(node),
        inputs=tuple(one.name for one in node.all_input_nodes),
        shape=() if tensor is None else tuple(str(size) for size in tensor.shape),
        dtype="" if tensor is None else short_dtype(tensor.dtype),
        sizes=() if tensor is None else tuple(map(_hint, tensor.shape)),
        contracted=_contracted(node),
        flops=_flops(node),
        result_bytes=0 if tensor is None else _numel(tensor) * tensor.element_size(),
    )


def _role(node: fx.Node) -> Role:
    if node.op == "placeholder":
        return "input"
    if node.op == "output":
        return "output"
    if is_collective(node):
        return "collective"
    if is_call(node, WAIT):
        return "wait"
    if is_call(node, _GEMM_LIKE):
        return "gemm"
    if is_call(node, _VIEW_LIKE):
        return "view"
    namespace = node.target.namespace if isinstance(node.target, torch._ops.OpOverload) else ""
    if namespace == "mkcompile" or is_in_place(node):
        return "fused"
    return "attention" if "attention" in str(node.target) else "other"


def _call(node: fx.Node) -> str:
    if node.op in ("placeholder", "output"):
        return node.op
    target = node.args[0] if is_in_place(node) else node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default").removeprefix("_c10d_functional.")
    return getattr(node.target, "__name__", str(node.target))


def _arguments(node: fx.Node) -> str:
    args = node.args[1:] if is_in_place(node) else node.args  # its first one is the operator
    return ", ".join([*map(_text, args), *(f"{name}={_text(arg)}" for name, arg in node.kwargs.items())])


def _text(arg: Any) -> str:
    if isinstance(arg, fx.Node):
        return arg.name
    if isinstance(arg, (list, tuple)):
        return f"[{', '.join(map(_text, arg))}]"
    return str(arg)


def _hint(size: int | torch.SymInt) -> int:
    """A number for a size; a symbolic one counts as the example's size, one without an example as 1."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else 1


def _numel(tensor: torch.Tensor) -> int:
    return prod(map(_hint, tensor.shape))


def _contracted(node: fx.Node) -> int:
    """The k of a GEMM, 0 for other nodes."""
    if not is_call(node, _GEMM_LIKE):
        return 0
    left = node.args[1] if node.target in (aten.addmm.default, aten.baddbmm.default) else node.args[0]
    return _hint(left.meta["val"].shape[-1]) if isinstance(left, fx.Node) else 0


def _flops(node: fx.Node) -> int:
    """2 m n k of a GEMM; the two products of an attention, halved where it is causal, 2.5 times that in backward."""
    val = node.meta.get("val")
    if is_call(node, _GEMM_LIKE):
        return 2 * _contracted(node) * _numel(val) if isinstance(val, torch.Tensor) else 0
    if _role(node) != "attention":
        return 0
    tensors = [one.meta["val"] for one in node.all_input_nodes if isinstance(one.meta.get("val"), torch.Tensor)]
    heads = [one for one in tensors if one.dim() == 4]
    if len(heads) < 2:
        return 0
    flops = 4 * _numel(heads[0]) * _hint(heads[-1].shape[-2])
    causal = 2 if any(arg is True for arg in node.args) else 1
    return flops // causal * 5 // 2 if "backward" in str(node.target) else flops // causal
