"""What feeds a reduction: a sum of GEMMs with a bias, and the unary operations between it and the collective.

Legend: M rows, N columns, K_i inner size of product i.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from mkcompile.ops._scaled import OPERAND_DTYPES, scaling
from mkcompile.passes.graph import CAST, GEMMS, SCALED_GEMMS, VIEWS, argument, aten, is_call, peel, shape_of, value
from mkcompile.passes.reason import Reason, Why
from mkcompile.passes.sizes import Size, same_shape, same_size

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCALES = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
PERMUTES = (aten.permute.default,)
OTHER_GEMMS = (aten.bmm.default, aten.baddbmm.default, aten._grouped_mm.default, aten._scaled_mm_v2.default)
# What these put into another order of rows (experts' tokens, say) is this argument.
_MOVED = {aten.index.Tensor: 0, aten.index_put.default: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """The scales of one product of 8-bit floats, and how it accumulates."""

    x: fx.Node
    w: fx.Node
    fast_accum: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One GEMM node read as `x @ w + bias`. Shapes: x [M, K], w [K, N] (any strides), bias [N].

    With `scales` it is `(x * scales.x) @ (w * scales.w) + bias`.
    """

    node: fx.Node
    x: fx.Node
    w: fx.Node
    bias: fx.Node | None
    scales: Scales | None = None

    @property
    def kind(self) -> tuple[torch.dtype, bool | None]:
        """What the products of one operator call must have in common."""
        return value(self.node).dtype, self.scales.fast_accum if self.scales else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemms:
    """`sum_i x[i] @ w[i] + bias`, and how the reduction's input is made of it.

    Shapes: x[i] [M, K_i], w[i] [K_i, N] with any strides (views are passed on, never copied), bias [N].
    `covers`: every node that the fused operator computes instead. `dtype` is that of the products. `scales`: one for
    each product, or none at all. `after`: what is to be applied to the reduced tensor
    again, in order: scalings; and, where permutes are among what lies between, all of it.
    """

    x: tuple[fx.Node, ...]
    w: tuple[fx.Node, ...]
    bias: fx.Node | None
    covers: tuple[fx.Node, ...]
    dtype: torch.dtype
    after: tuple[fx.Node, ...] = ()
    scales: tuple[Scales, ...] = ()

    @property
    def shape(self) -> tuple[Size, Size]:
        """[M, N]; symbolic sizes stay symbolic."""
        return shape_of(self.x[0])[0], shape_of(self.w[0])[1]

    def scaled_arguments(self) -> tuple[Any, Any, Any, Any, Any, torch.dtype, bool]:
        """How an operator on scaled products begins: x, w, x_scale, w_scale, bias, out_dtype, fast_accum."""
        x_scale, w_scale = [one.x for one in self.scales], [one.w for one in self.scales]
        return list(self.x), list(self.w), x_scale, w_scale, self.bias, self.dtype, self.scales[0].fast_accum


def product(node: fx.Node) -> Product | Why:
    """The node itself as one GEMM: `mm`, or `addmm` with a bias [N] and no scaling."""
    if is_call(node, (aten.mm.default,)):
        x, w = node.args[:2]
        return _checked(Product(node=node, x=x, w=w, bias=None))  # type: ignore[arg-type]
    if is_call(node, (aten.addmm.default,)):
        bias, x, w = node.args[:3]
        if argument(node, 3, "beta", 1) != 1 or argument(node, 4, "alpha", 1) != 1:
            return Why(reason=Reason.GEMM_SCALED, detail=node.name)
        if not _is_bias(bias, shape_of(node)[-1]):
            return Why(reason=Reason.BIAS_SHAPE, detail=f"{bias} {shape_of(bias)}")  # type: ignore[arg-type]
        return _checked(Product(node=node, x=x, w=w, bias=bias))  # type: ignore[arg-type]
    if is_call(node, SCALED_GEMMS):
        return _scaled_product(node)
    if is_call(node, OTHER_GEMMS):
        return Why(reason=Reason.GEMM_KIND, detail=node.name)
    return Why(reason=Reason.NO_GEMM)


def _scaled_product(node: fx.Node) -> Product | Why:
    """`_scaled_mm` with one scale a tensor, or one a row and a column."""
    x, w, x_scale, w_scale = (argument(node, i, name) for i, name in enumerate(("self", "mat2", "scale_a", "scale_b")))
    bias, result_scale = argument(node, 4, "bias"), argument(node, 5, "scale_result")
    kind = scaling((value(x_scale), value(w_scale)), *shape_of(node))
    if result_scale is not None or kind is None:
        return Why(reason=Reason.SCALES, detail=f"{node.name} {shape_of(x_scale)} {shape_of(w_scale)}")
    if value(node).dtype not in DTYPES or any(value(one).dtype not in OPERAND_DTYPES for one in (x, w)):
        return Why(reason=Reason.DTYPE, detail=f"{node.name} {value(node).dtype}")
    if bias is not None and value(bias).dtype != value(node).dtype:
        return Why(reason=Reason.UNEQUAL_PRODUCTS, detail=bias.name)
    scales = Scales(x=x_scale, w=w_scale, fast_accum=bool(argument(node, 7, "use_fast_accum", False)))
    return Product(node=node, x=x, w=w, bias=bias, scales=scales)


def gemms_before(
    node: fx.Node, readers: Collection[fx.Node], *, keeps_places: bool = False, result: fx.Node | None = None
) -> Gemms | Why:
    """The sum of GEMMs that `node`, the input of a reduction, is made of.

    `readers` are the nodes that may read `node` (the collective, or the split in front of it); any other reader, and
    any other reader of a node on the way, needs the unreduced product: PRODUCT_USED_ELSEWHERE or PRODUCT_SAVED.
    `keeps_places`: the reduction leaves every element where it is (all-reduce), so that permutes may be applied after
    it, too. `result`: the reduced tensor; where all its readers cast it back, a widening cast in front commutes.
    """
    chain: list[fx.Node] = []
    current = node
    between = (*VIEWS, *CAST, *PERMUTES) if keeps_places else (*VIEWS, *CAST)
    while is_call(current, between) or is_scale(current):
        chain.insert(0, current)
        current = current.args[0]  # type: ignore[assignment]
    terms = _Terms()
    why = terms.collect(current)
    if why is None:
        why = _why_not_after(chain, terms, result) or why_shared([*terms.covers, *chain], readers)
    if why is not None:
        return why
    moves = any(is_call(one, PERMUTES) for one in chain)
    return Gemms(
        x=tuple(one.x for one in terms.products),
        w=tuple(one.w for one in terms.products),
        bias=terms.bias,
        covers=(*terms.covers, *chain),
        dtype=value(terms.products[0].node).dtype,
        after=tuple(one for one in chain if moves or is_scale(one) or is_call(one, CAST)),
        scales=tuple(one.scales for one in terms.products if one.scales is not None),
    )


@dataclass(slots=True)
class _Terms:
    """The addends found so far."""

    products: list[Product] = field(default_factory=list)
    covers: list[fx.Node] = field(default_factory=list)
    bias: fx.Node | None = None

    def collect(self, node: fx.Node) -> Why | None:
        """Add what `node` is the sum of; a Why if any part of it is no product and no bias."""
        if is_call(node, (*GEMMS, *SCALED_GEMMS)):
            found = product(node)
            return found if isinstance(found, Why) else self._add(found)
        if is_call(node, (aten.add.Tensor,)):
            return self._collect_sum(node)
        if is_call(node, OTHER_GEMMS):
            return Why(reason=Reason.GEMM_KIND, detail=node.name)
        above = gemm_above(node)
        if above is None:
            return Why(reason=Reason.NO_GEMM)
        if is_call(above, OTHER_GEMMS):
            return Why(reason=Reason.GEMM_KIND, detail=above.name)
        return Why(reason=Reason.OP_BETWEEN, detail=node.name)

    def _add(self, found: Product) -> Why | None:
        if found.bias is not None and self.bias is not None:
            return Why(reason=Reason.SEVERAL_BIASES, detail=found.node.name)
        first = self.products[0] if self.products else found
        same_operands = [value(x).dtype for x in (first.x, first.w)] == [value(x).dtype for x in (found.x, found.w)]
        if not same_shape(shape_of(first.node), shape_of(found.node)) or first.kind != found.kind or not same_operands:
            return Why(reason=Reason.UNEQUAL_PRODUCTS, detail=f"{first.node.name}, {found.node.name}")
        self.products.append(found)
        self.covers.append(found.node)
        self.bias = self.bias or found.bias
        return None

    def _collect_sum(self, node: fx.Node) -> Why | None:
        left, right = node.args[:2]
        if not isinstance(left, fx.Node) or not isinstance(right, fx.Node) or argument(node, 2, "alpha", 1) != 1:
            return Why(reason=Reason.OP_BETWEEN if reaches_gemm(node) else Reason.NO_GEMM, detail=node.name)
        if not reaches_gemm(left) and not reaches_gemm(right):
            return Why(reason=Reason.NO_GEMM)
        for addend, other in ((left, right), (right, left)):
            if not same_shape(shape_of(addend), shape_of(node)) or (
                peel(addend) is addend and not reaches_gemm(addend)
            ):
                return self._collect_bias(node, addend, other)
        why = self._collect_addend(left, node) or self._collect_addend(right, node)
        self.covers.append(node)
        return why

    def _collect_addend(self, addend: fx.Node, node: fx.Node) -> Why | None:
        """An addend may be a view of its product or sum; which elements meet must not change by it."""
        source, views = addend, []
        while is_call(source, VIEWS):
            views.append(source)
            source = source.args[0]  # type: ignore[assignment]
        why = self.collect(source)
        if why is not None:
            return Why(reason=Reason.ADDEND_NOT_GEMM, detail=source.name) if why.reason is Reason.NO_GEMM else why
        if value(source).dtype != value(node).dtype:
            return Why(reason=Reason.UNEQUAL_PRODUCTS, detail=node.name)
        self.covers.extend(reversed(views))
        return None

    def _collect_bias(self, node: fx.Node, bias: fx.Node, other: fx.Node) -> Why | None:
        """`node` adds to a sum of products something smaller or something that is no product."""
        why = self._collect_addend(other, node)
        if why is not None:
            return why
        if same_shape(shape_of(bias), shape_of(node)) and len(shape_of(bias)) > 1:
            return Why(reason=Reason.ADDEND_NOT_GEMM, detail=bias.name)
        columns = shape_of(self.products[0].node)[-1]
        source = bias if _is_bias(bias, columns) else peel(bias)
        # [N, 1] has as many elements as [1, N], and means something else
        along_columns = all(same_size(shape_of(one)[-1], columns) for one in (bias, node) if shape_of(one))
        if not _is_bias(source, columns) or not along_columns:
            return Why(reason=Reason.BIAS_SHAPE, detail=f"{bias.name} {shape_of(bias)}")
        if value(source).dtype != value(node).dtype:
            return Why(reason=Reason.UNEQUAL_PRODUCTS, detail=bias.name)
        if self.bias is not None:
            return Why(reason=Reason.SEVERAL_BIASES, detail=bias.name)
        self.bias = source
        self.covers.append(node)
        return None


def reaches_gemm(node: Any) -> bool:
    """Is a GEMM within a few steps above the node? Tells NO_GEMM from OP_BETWEEN."""
    return gemm_above(node) is not None


def gemm_above(node: Any, depth: int = 8) -> fx.Node | None:
    """The GEMM within a few unary, summing or row-moving steps above the node."""
    if not isinstance(node, fx.Node) or depth == 0 or node.op != "call_function":
        return None
    if is_call(node, (*GEMMS, *SCALED_GEMMS, *OTHER_GEMMS)):
        return node
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace not in ("aten", "prims"):
        return None
    if node.target in _MOVED:
        return gemm_above(node.args[_MOVED[node.target]], depth - 1)
    unary = [one for one in node.all_input_nodes if isinstance(one.meta.get("val"), torch.Tensor)]
    if len(unary) > 1 and not is_call(node, (aten.add.Tensor,)):
        return next((one for one in map(peel, unary) if is_call(one, (*GEMMS, *SCALED_GEMMS, *OTHER_GEMMS))), None)
    return next((one for one in (gemm_above(each, depth - 1) for each in unary) if one is not None), None)


def _checked(found: Product) -> Product | Why:
    dtype = value(found.node).dtype
    if dtype not in DTYPES or any(value(one).dtype != dtype for one in (found.x, found.w)):
        return Why(reason=Reason.DTYPE, detail=f"{found.node.name} {dtype}")
    return found


def _is_bias(node: Any, columns: Size) -> bool:
    shape = shape_of(node) if isinstance(node, fx.Node) else ()
    return len(shape) == 1 and same_size(shape[0], columns)


def is_scale(node: fx.Node) -> bool:
    """A product or quotient with a Python number, which commutes with sums and averages."""
    return is_call(node, SCALES) and isinstance(node.args[0], fx.Node) and isinstance(node.args[1], (int, float))


def factor_of(scale: fx.Node) -> float:
    """What a scale multiplies by."""
    number = float(scale.args[1])  # type: ignore[arg-type]
    if not is_call(scale, SCALES[2:]):
        return number
    return 1 / number if number else math.inf


def _why_not_after(chain: list[fx.Node], terms: _Terms, result: fx.Node | None) -> Why | None:
    """Scalings commute, except that a float16 sum may overflow without one that makes it smaller."""
    dtype = value(terms.products[0].node).dtype
    for node in chain:
        if is_call(node, CAST) and not (result is not None and _is_undone(node, chain, dtype, result)):
            return Why(reason=Reason.CAST_BEFORE_REDUCTION, detail=node.name)
        if not is_scale(node):
            continue
        if abs(factor_of(node)) < 1 and value(node).dtype == torch.float16:
            return Why(reason=Reason.SCALE_MAY_OVERFLOW, detail=node.name)
        if value(node).dtype != dtype or node.kwargs:
            return Why(reason=Reason.OP_BETWEEN, detail=node.name)
    return None


def _is_undone(cast: fx.Node, chain: list[fx.Node], dtype: torch.dtype, result: fx.Node) -> bool:
    """Reduced in float32, read in the product's dtype: what operators do, which sum in float32 and round once."""
    if cast.kwargs or value(cast).dtype != torch.float32 or any(is_scale(node) for node in chain):
        return False
    readers = [user for one in result.users for user in (one.users if is_call(one, VIEWS) else [one])]
    return bool(readers) and all(is_call(user, CAST) and value(user).dtype == dtype for user in readers)


def why_shared(covers: Collection[fx.Node], readers: Collection[fx.Node]) -> Why | None:
    """Why the nodes `covers` have to exist: something reads one that is neither among them nor among `readers`."""
    inside = {*covers, *readers}
    others = [(node, user) for node in covers for user in node.users if user not in inside]
    if not others:
        return None
    saved = all(_is_only_returned(user) for _, user in others)
    node, user = others[0]
    reason = Reason.PRODUCT_SAVED if saved else Reason.PRODUCT_USED_ELSEWHERE
    return Why(reason=reason, detail=f"{node.name} by {user.name}")


def _is_only_returned(user: fx.Node) -> bool:
    """Is it the end of the graph, or views that only the end reads?"""
    if user.op == "output":
        return True
    return is_call(user, (*VIEWS, *PERMUTES)) and all(_is_only_returned(one) for one in user.users)
