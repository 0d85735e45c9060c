"""Products of scaled 8-bit floats, `(x * x_scale) @ (w * w_scale)`: what the operators that have a scaled form share.

Legend: M rows, N columns, K inner size. Scales are float32: one for a whole tensor (one element, any shape), or one for
each row of x ([M, 1]) and each column of w ([1, N]).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from mkcompile.errors import OperatorInputError
from mkcompile.ops import checks
from mkcompile.ops._gemms import ReducedSum, reduced_sum
from mkcompile.ops.problem import Problem

OPERAND_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
RESULT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BY_TENSOR, BY_ROW = "tensor", "row"

Scales = tuple[Tensor, Tensor]


class Scaled(Protocol):
    """What a call says about its scaled products: one x_scale and one w_scale for each."""

    @property
    def x_scale(self) -> Sequence[Tensor]: ...
    @property
    def w_scale(self) -> Sequence[Tensor]: ...
    @property
    def out_dtype(self) -> torch.dtype: ...
    @property
    def fast_accum(self) -> bool: ...


class ScaledSum(Scaled, ReducedSum, Protocol):
    """A call that reduces a sum of scaled products."""


def scaling(scales: Scales, rows: int, columns: int) -> str | None:
    """`tensor` or `row`; None for scales that are neither, or no float32."""
    x_scale, w_scale = scales
    if any(one.dtype is not torch.float32 for one in scales):
        return None
    by_row = tuple(x_scale.shape) == (rows, 1) and tuple(w_scale.shape) == (1, columns)
    if x_scale.numel() == 1 and w_scale.numel() == 1:
        return BY_TENSOR
    return BY_ROW if by_row else None


def product(x_MK: Tensor, w_KN: Tensor, scales: Scales, bias: Tensor | None, call: Scaled) -> Tensor:
    """One product, rounded once, by ATen. Shapes: [M, K], [K, N], bias [N] of the result's dtype -> [M, N]."""
    out: Tensor = torch.ops.aten._scaled_mm(
        x_MK, w_KN, *scales, bias, out_dtype=call.out_dtype, use_fast_accum=call.fast_accum
    )
    return out


def check_scales(operator: str, call: Scaled, shapes: Sequence[tuple[int, int]]) -> None:
    """Scales for products of these rows and columns, and a dtype that they may have.

    Raises: OperatorInputError.
    """
    if call.out_dtype not in RESULT_DTYPES:
        raise OperatorInputError(f"{operator}: out_dtype {call.out_dtype}; give bfloat16, float16 or float32")
    counts = {len(call.x_scale), len(call.w_scale), len(shapes)}
    if len(counts) != 1:
        raise OperatorInputError(
            f"{operator}: give one x_scale and one w_scale for each of {len(shapes)} products, "
            f"got {len(call.x_scale)} and {len(call.w_scale)}"
        )
    for i, (rows, columns) in enumerate(shapes):
        scales = call.x_scale[i], call.w_scale[i]
        if scaling(scales, rows, columns) is None:
            raise OperatorInputError(
                f"{operator}: scales {i} have shapes {tuple(scales[0].shape)} and {tuple(scales[1].shape)}; give "
                f"float32 scales of one element each, or ({rows}, 1) and (1, {columns})"
            )


def check_operands(operator: str, x: Sequence[Tensor], w: Sequence[Tensor]) -> None:
    """Raises: OperatorInputError unless all of them are 8-bit floats on one device; x may differ from w in format."""
    for name, tensors in (("x", x), ("w", w)):
        for tensor in tensors:
            if tensor.dtype not in OPERAND_DTYPES:
                raise OperatorInputError(
                    f"{operator}: {name} is {tensor.dtype}; scaled products take float8_e4m3fn and float8_e5m2"
                )
        checks.check_same(operator, f"all of {name}", tensors)
    checks.check_one_device(operator, "inputs and weights", [*x, *w])


def check_bias(operator: str, bias: Tensor | None, columns: int, call: Scaled) -> None:
    """Raises: OperatorInputError unless None or [columns] of the result's dtype."""
    checks.check_bias(operator, bias, columns)
    if bias is not None and bias.dtype is not call.out_dtype:
        raise OperatorInputError(f"{operator}: bias is {bias.dtype}; give the result's {call.out_dtype}")


def check_sum(operator: str, call: ScaledSum) -> None:
    """Raises: OperatorInputError unless the call is a sum of scaled products with their scales."""
    checks.check_not_meta(operator, [*call.x, *call.w, *call.x_scale, *call.w_scale, call.bias])
    checks.check_products(operator, call.x, call.w)
    check_operands(operator, call.x, call.w)
    check_scales(operator, call, [(x_MK.shape[0], w_KN.shape[1]) for x_MK, w_KN in zip(call.x, call.w, strict=True)])
    check_bias(operator, call.bias, call.w[0].shape[1], call)


def total(call: ScaledSum) -> Tensor:
    """`sum_i (x[i] * x_scale[i]) @ (w[i] * w_scale[i]) + bias`, each product and sum in the result's dtype."""
    terms = zip(call.x, call.w, call.x_scale, call.w_scale, strict=True)
    products = (
        product(x_MK, w_KN, (x_scale, w_scale), call.bias if i == 0 else None, call)
        for i, (x_MK, w_KN, x_scale, w_scale) in enumerate(terms)
    )
    out = next(products)
    for one in products:
        out = out + one
    return out


def scaled_problem(base: Problem, call: Scaled, rows: int, columns: int) -> Problem:
    """The problem of the same products without scales, with what scaling changes. `columns` are the first weight's."""
    found = scaling((call.x_scale[0], call.w_scale[0]), rows, columns)
    return replace(base, out_bytes=call.out_dtype.itemsize, scales=found or "")


def sum_problem(operator: str, call: ScaledSum) -> Problem:
    """As `reduced_sum`."""
    return scaled_problem(reduced_sum(operator, call), call, call.x[0].shape[0], call.w[0].shape[1])
