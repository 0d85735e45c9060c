"""All-gather + GEMMs on the gathered tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from mkcompile.errors import OperatorInputError
from mkcompile.ops import _scaled, by_hand, checks, collectives
from mkcompile.ops._gemms import common_layout, dtype_name, static_size
from mkcompile.ops.groups import AnyGroup
from mkcompile.ops.problem import Problem
from mkcompile.ops.registry import register

FORM_INPUT, FORM_TRANSPOSED, FORM_WEIGHT, FORM_WEIGHT_TRANSPOSED = range(4)
_FORMS = range(4)
_Operand = TypeVar("_Operand")
_WEIGHTS_LEFT = (FORM_WEIGHT, FORM_WEIGHT_TRANSPOSED)


@register
@dataclass(frozen=True, slots=True)
class AllGatherGemm:
    """Gather `x` along `dim` over the group, then one product for each weight.

    Shapes: x [.., S, ..] on each rank -> gathered [.., world_size * S, ..], read as g [M, K] with K its last
    dimension. `forms[i]` says what is made of w[i]: 0: g @ w ([K, N] -> [M, N]); 1: g^T @ w ([M, N] -> [K, N]);
    2: w @ g ([N, M] -> [N, K]); 3: w @ g^T ([N, K] -> [N, M]). A bias (form 0 only) is [N]. The result is the products
    in order, then the gathered tensor where `return_gathered`.
    """

    NAME: ClassVar[str] = "all_gather_gemm"
    SCHEMA: ClassVar[str] = (
        "(Tensor x, Tensor[] w, Tensor?[] bias, int[] forms, int dim, bool return_gathered, int world_size, "
        "str group, str plan_key) -> Tensor[]"
    )

    x: Tensor
    w: Sequence[Tensor]
    bias: Sequence[Tensor | None]
    forms: Sequence[int]
    dim: int
    return_gathered: bool
    world_size: int
    group: str
    plan_key: str

    def gathered_shape(self) -> list[int]:
        """The gathered tensor's."""
        return [size * self.world_size if i == self.dim else size for i, size in enumerate(self.x.shape)]

    def check(self) -> None:
        """Raises: OperatorInputError, GroupError."""
        self.check_shapes(self.NAME)
        checks.check_not_scaled(self.NAME, self.x)
        checks.check_same(self.NAME, "input, weights and biases", [self.x, *self.w, *self.bias])
        checks.check_not_meta(self.NAME, [self.x, *self.w, *self.bias])
        checks.check_group(self.NAME, self.group, self.world_size)

    def check_shapes(self, operator: str) -> None:
        """Raises: OperatorInputError, in the name of `operator`."""
        checks.check_tensor(operator, "x", self.x)
        checks.check_dim(operator, self.dim, self.x.dim())
        if not self.w or len({len(self.w), len(self.forms), len(self.bias)}) != 1:
            raise OperatorInputError(
                f"{operator}: give one form and one bias (or None) for each weight and at least one weight; got "
                f"{len(self.w)} weights, {len(self.forms)} forms, {len(self.bias)} biases"
            )
        for i in range(len(self.w)):
            self._check_product(operator, i)

    def _check_product(self, operator: str, i: int) -> None:
        weight, form, bias = self.w[i], self.forms[i], self.bias[i]
        checks.check_tensor(operator, f"w[{i}]", weight, 2)
        if form not in _FORMS:
            raise OperatorInputError(f"{operator}: form {form} of w[{i}] is not 0, 1, 2 or 3")
        shape = self.gathered_shape()
        wanted = shape[-1] if form in (FORM_INPUT, FORM_WEIGHT_TRANSPOSED) else prod(shape[:-1])
        inner = weight.shape[1 if form in _WEIGHTS_LEFT else 0]
        if inner != wanted:
            raise OperatorInputError(f"{operator}: w[{i}] (form {form}) must have inner size {wanted}, got {inner}")
        if bias is not None and (form != FORM_INPUT or tuple(bias.shape) != (weight.shape[1],)):
            raise OperatorInputError(f"{operator}: bias[{i}] must be [{weight.shape[1]}] and belong to form 0")

    def reference(self) -> list[Tensor]:
        """One all-gather, then the GEMMs by ATen."""
        return self.of_gathered(collectives.all_gather(self.x, self.dim, self.world_size, self.group))

    def of_gathered(self, gathered: Tensor) -> list[Tensor]:
        """The results, once the shards are there. Shapes: gathered as `gathered_shape`."""
        gathered_MK = gathered.reshape(-1, gathered.shape[-1])
        products = [_product(gathered_MK, *each) for each in zip(self.w, self.bias, self.forms, strict=True)]
        return [*products, gathered] if self.return_gathered else products

    def of_kernels(self) -> AllGatherGemm | None:
        """The part of a mixed call that kernels make: products of form 0, and the gathered tensor for the others.

        None where the call is of one kind.
        """
        w, bias = of_form_input(self.w, self.forms), of_form_input(self.bias, self.forms)
        if not w or len(w) == len(self.w):
            return None
        return replace(self, w=w, bias=bias, forms=[FORM_INPUT] * len(w), return_gathered=True)

    def fake(self) -> list[Tensor]:
        """Empty products, then an empty gathered tensor where it is returned."""
        shape = self.gathered_shape()
        rows, columns = prod(shape[:-1]), shape[-1]
        products = []
        for weight, form in zip(self.w, self.forms, strict=True):
            of_gathered = rows if form in (FORM_INPUT, FORM_WEIGHT_TRANSPOSED) else columns
            is_left = form in _WEIGHTS_LEFT
            products.append(
                self.x.new_empty((weight.shape[0], of_gathered) if is_left else (of_gathered, weight.shape[1]))
            )
        return [*products, self.x.new_empty(shape)] if self.return_gathered else products

    def problem(self) -> Problem:
        """m gathered rows, n summed over the weights."""
        shape = self.gathered_shape()
        inputs = [weight for weight, form in zip(self.w, self.forms, strict=True) if form == FORM_INPUT]
        widths = [w.shape[0 if form in _WEIGHTS_LEFT else 1] for w, form in zip(self.w, self.forms, strict=True)]
        return Problem(
            operator=self.NAME,
            m=static_size(prod(shape[:-1])),
            n=sum(static_size(width) for width in widths),
            k=static_size(shape[-1]),
            world_size=self.world_size,
            dtype=dtype_name(self.x),
            dtype_bytes=self.x.element_size(),
            outer=static_size(prod(shape[: self.dim])),
            num_gemms=len(self.w),
            dim="columns" if self.dim == self.x.dim() - 1 else "rows",
            weight_layout=common_layout(inputs) if inputs else "other",
            has_bias=any(one is not None for one in self.bias),
            returns_gathered=self.return_gathered,
            weight_products=len(self.w) - len(inputs),
        )


@register
@dataclass(frozen=True, slots=True)
class AllGatherScaledGemm:
    """Gather `x`, 8-bit floats, along `dim` over the group, then one scaled product `g @ w[i]` for each weight.

    Shapes: x, w, bias and results as in form 0 of `AllGatherGemm`; scales as in `ops/_scaled.py`, x_scale[i] those of
    the gathered rows [M, 1] as product i reads them. Bias and products have `out_dtype`, the gathered tensor x's dtype.
    """

    NAME: ClassVar[str] = "all_gather_scaled_gemm"
    SCHEMA: ClassVar[str] = (
        "(Tensor x, Tensor[] w, Tensor[] x_scale, Tensor[] w_scale, Tensor?[] bias, ScalarType out_dtype, "
        "bool fast_accum, int dim, bool return_gathered, int world_size, str group, str plan_key) -> Tensor[]"
    )

    x: Tensor
    w: Sequence[Tensor]
    x_scale: Sequence[Tensor]
    w_scale: Sequence[Tensor]
    bias: Sequence[Tensor | None]
    out_dtype: torch.dtype
    fast_accum: bool
    dim: int
    return_gathered: bool
    world_size: int
    group: str
    plan_key: str

    @property
    def _plain(self) -> AllGatherGemm:
        """The call without its scales: the same shapes."""
        forms = [FORM_INPUT] * len(self.w)
        rest = self.dim, self.return_gathered, self.world_size, self.group, self.plan_key
        return AllGatherGemm(self.x, self.w, self.bias, forms, *rest)

    def check(self) -> None:
        """Raises: OperatorInputError, GroupError."""
        self._plain.check_shapes(self.NAME)
        checks.check_not_meta(self.NAME, [self.x, *self.w, *self.x_scale, *self.w_scale, *self.bias])
        _scaled.check_operands(self.NAME, [self.x], self.w)
        rows = prod(self._plain.gathered_shape()[:-1])
        _scaled.check_scales(self.NAME, self, [(rows, w_KN.shape[1]) for w_KN in self.w])
        for w_KN, bias in zip(self.w, self.bias, strict=True):
            _scaled.check_bias(self.NAME, bias, w_KN.shape[1], self)
        checks.check_group(self.NAME, self.group, self.world_size)

    def reference(self) -> list[Tensor]:
        """One all-gather, then the scaled products by ATen."""
        gathered = collectives.all_gather(self.x, self.dim, self.world_size, self.group)
        gathered_MK = gathered.reshape(-1, gathered.shape[-1])
        terms = zip(self.w, self.x_scale, self.w_scale, self.bias, strict=True)
        products = [_scaled.product(gathered_MK, w, (of_x, of_w), bias, self) for w, of_x, of_w, bias in terms]
        return [*products, gathered] if self.return_gathered else products

    def fake(self) -> list[Tensor]:
        """Empty products, then an empty gathered tensor where it is returned."""
        shape = self._plain.gathered_shape()
        products = [self.x.new_empty((prod(shape[:-1]), w_KN.shape[1]), dtype=self.out_dtype) for w_KN in self.w]
        return [*products, self.x.new_empty(shape)] if self.return_gathered else products

    def problem(self) -> Problem:
        """That of `AllGatherGemm`, of 8-bit operands."""
        rows = prod(self._plain.gathered_shape()[:-1])
        return _scaled.scaled_problem(self._plain.problem(), self, rows, self.w[0].shape[1])


def of_form_input(operands: Sequence[_Operand], forms: Sequence[int]) -> list[_Operand]:
    """Those that belong to products of form 0."""
    return [one for one, form in zip(operands, forms, strict=True) if form == FORM_INPUT]


def completed(made: Sequence[Tensor], w: Sequence[Tensor], forms: Sequence[int], return_gathered: bool) -> list[Tensor]:
    """All results of a mixed call, from those of its `of_kernels`."""
    *products, gathered = made
    ready, gathered_MK = iter(products), gathered.reshape(-1, gathered.shape[-1])
    every = [
        next(ready) if form == FORM_INPUT else _product(gathered_MK, weight, None, form)
        for weight, form in zip(w, forms, strict=True)
    ]
    return [*every, gathered] if return_gathered else every


def _product(gathered_MK: Tensor, weight: Tensor, bias: Tensor | None, form: int) -> Tensor:
    if form == FORM_TRANSPOSED:
        return torch.mm(gathered_MK.t(), weight)
    if form == FORM_WEIGHT:
        return torch.mm(weight, gathered_MK)
    if form == FORM_WEIGHT_TRANSPOSED:
        return torch.mm(weight, gathered_MK.t())
    return torch.mm(gathered_MK, weight) if bias is None else torch.addmm(bias, gathered_MK, weight)


def all_gather_gemm(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, dim: int = 0, group: AnyGroup = None
) -> Tensor:
    """`all_gather(x, dim) @ w + bias`: a column-parallel linear layer on sequence-parallel input. Inference only.

    Shapes: x [.., S, .., K] on each rank, gathered along `dim` (negative ones count from the last); w [K, N] (a
    Linear's weight is `linear.weight.t()`), with all gathered columns where `dim` is the last; bias [N]; the result has
    the gathered tensor's shape with N columns. `group` is a name, a ProcessGroup, a one-dimensional DeviceMesh, or None
    for all ranks.
    Raises: OperatorInputError, GroupError, PlanMismatchError.
    """
    name = AllGatherGemm.NAME
    group_name, world_size = by_hand.group_and_size(name, group)
    by_hand.rows(name, x)
    counted = dim + x.dim() if dim < 0 else dim
    call = AllGatherGemm(x, [w], [bias], [FORM_INPUT], counted, False, world_size, group_name, "")
    (out_MN,) = by_hand.run(call)
    leading = [size * world_size if i == counted else size for i, size in enumerate(x.shape[:-1])]
    out: Tensor = out_MN.reshape(*leading, w.shape[1])
    return out
