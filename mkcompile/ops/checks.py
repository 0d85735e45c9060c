"""Argument checks that all operators share; each says what was wrong and what would be right."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from mkcompile.errors import GroupError, OperatorInputError
from mkcompile.ops.groups import resolve

REDUCE_OPS = ("sum", "avg")


def check_group(operator: str, group: str, world_size: int) -> None:
    """The group exists, this rank is in it, and it has `world_size` members.

    Raises: GroupError.
    """
    resolved = resolve(operator, group)
    if resolved.size() != world_size:
        raise GroupError(
            f"{operator}: group {group!r} has {resolved.size()} ranks, the call says {world_size}; what was compiled "
            "for an earlier group of that name has to be compiled again (torch._dynamo.reset)"
        )


def check_reduce_op(operator: str, reduce_op: str) -> None:
    """Raises: OperatorInputError unless `sum` or `avg`."""
    if reduce_op not in REDUCE_OPS:
        raise OperatorInputError(
            f"{operator}: reduce op {reduce_op!r} can't be fused; use one of {', '.join(REDUCE_OPS)}"
        )


def check_tensor(operator: str, name: str, tensor: object, num_dims: int | None = None) -> None:
    """A dense floating-point tensor with `num_dims` dimensions.

    Raises: OperatorInputError.
    """
    if not isinstance(tensor, Tensor):
        raise OperatorInputError(f"{operator}: {name} is a {type(tensor).__name__}; give a tensor")
    if tensor.layout is not torch.strided:
        raise OperatorInputError(f"{operator}: {name} is {tensor.layout}; give a dense (strided) tensor")
    if not tensor.is_floating_point():
        raise OperatorInputError(f"{operator}: {name} is {tensor.dtype}; give a floating-point tensor")
    if num_dims is not None and tensor.dim() != num_dims:
        raise OperatorInputError(f"{operator}: {name} has shape {tuple(tensor.shape)}; give {num_dims} dimensions")


def check_same(operator: str, names: str, tensors: Sequence[Tensor | None]) -> None:
    """All tensors have one dtype and one device.

    Raises: OperatorInputError.
    """
    dtypes = sorted({str(tensor.dtype) for tensor in tensors if tensor is not None})
    if len(dtypes) > 1:
        raise OperatorInputError(f"{operator}: {names} must have one dtype, got {', '.join(dtypes)}")
    check_one_device(operator, names, tensors)


def check_one_device(operator: str, names: str, tensors: Sequence[Tensor | None]) -> None:
    """Raises: OperatorInputError."""
    devices = sorted({str(tensor.device) for tensor in tensors if tensor is not None})
    if len(devices) > 1:
        raise OperatorInputError(f"{operator}: {names} must be on one device, got {', '.join(devices)}")


def check_not_scaled(operator: str, x: Tensor) -> None:
    """Raises: OperatorInputError for 8-bit floats, which mean nothing without their scales."""
    if x.element_size() == 1:
        raise OperatorInputError(
            f"{operator}: x is {x.dtype}, which needs scales; give bfloat16, float16 or float32, or call the operator "
            "of scaled products"
        )


def check_not_meta(operator: str, tensors: Sequence[Tensor | None]) -> None:
    """Real tensors only: shape inference goes through fake tensors, not through meta tensors.

    Raises: OperatorInputError.
    """
    if any(type(t) is Tensor and t.is_meta for t in tensors):
        raise OperatorInputError(f"{operator}: a meta tensor has no data; call it with CPU or CUDA tensors")


def check_gemms(operator: str, x: Sequence[Tensor], w: Sequence[Tensor], bias: Tensor | None) -> None:
    """x[i] [M, K_i], w[i] [K_i, N], bias [N], of one dtype on one device.

    Raises: OperatorInputError.
    """
    check_not_meta(operator, [*x, *w, bias])
    check_products(operator, x, w)
    check_bias(operator, bias, w[0].shape[1])
    check_not_scaled(operator, x[0])
    check_same(operator, "inputs, weights and bias", [*x, *w, bias])


def check_products(operator: str, x: Sequence[Tensor], w: Sequence[Tensor]) -> None:
    """x[i] [M, K_i], w[i] [K_i, N].

    Raises: OperatorInputError.
    """
    if not x or len(x) != len(w):
        raise OperatorInputError(
            f"{operator}: give as many inputs as weights and at least one, got {len(x)} and {len(w)}"
        )
    for i, (x_MK, w_KN) in enumerate(zip(x, w, strict=True)):
        check_tensor(operator, f"x[{i}]", x_MK, 2)
        check_tensor(operator, f"w[{i}]", w_KN, 2)
        if x_MK.shape[1] != w_KN.shape[0]:
            raise OperatorInputError(
                f"{operator}: x[{i}] has {x_MK.shape[1]} columns and w[{i}] {w_KN.shape[0]} rows; they must be equal"
            )
    for i, (x_MK, w_KN) in enumerate(zip(x[1:], w[1:], strict=True), start=1):
        if x_MK.shape[0] != x[0].shape[0] or w_KN.shape[1] != w[0].shape[1]:
            raise OperatorInputError(
                f"{operator}: summed products must have one shape; number {i} differs from number 0"
            )


def check_bias(operator: str, bias: Tensor | None, columns: int) -> None:
    """Raises: OperatorInputError unless None or [columns]."""
    if bias is not None:
        check_tensor(operator, "bias", bias)
        if bias.dim() != 1 or bias.shape[0] != columns:
            raise OperatorInputError(f"{operator}: bias has shape {tuple(bias.shape)}; give [{columns}]")


def check_residual(operator: str, residual: Tensor, shape: Sequence[int], like: Tensor) -> None:
    """A contiguous tensor of the result's shape, and of the dtype and device of `like`.

    Raises: OperatorInputError.
    """
    check_tensor(operator, "residual", residual)
    check_not_meta(operator, [residual])
    if tuple(residual.shape) != tuple(shape):
        raise OperatorInputError(
            f"{operator}: residual has shape {tuple(residual.shape)}; give the result's, {tuple(shape)}"
        )
    check_same(operator, "residual and inputs", [residual, like])
    if not residual.is_contiguous():
        raise OperatorInputError(f"{operator}: residual has strides {residual.stride()}; give a contiguous tensor")


def check_scatter(operator: str, shape: Sequence[int], dim: int, product: tuple[int, int], world_size: int) -> None:
    """`shape` reads a product [rows, columns] with the columns last, and the ranks divide its dimension `dim`.

    Raises: OperatorInputError.
    """
    check_dim(operator, dim, len(shape))
    rows, columns = product
    if len(shape) < 2 or shape[-1] != columns or prod(shape[:-1]) != rows:
        raise OperatorInputError(f"{operator}: shape {tuple(shape)} does not describe a product of {rows} x {columns}")
    check_divides(operator, f"dimension {dim} of {tuple(shape)}", shape[dim], world_size)


def check_divides(operator: str, what: str, size: int, world_size: int) -> None:
    """Raises: OperatorInputError unless `world_size` divides `size`."""
    if size % world_size != 0:
        raise OperatorInputError(f"{operator}: {what} is {size}, which {world_size} ranks do not divide")


def check_dim(operator: str, dim: int, num_dims: int) -> None:
    """Raises: OperatorInputError unless 0 <= dim < num_dims."""
    if not 0 <= dim < num_dims:
        raise OperatorInputError(f"{operator}: dim {dim} is outside 0..{num_dims - 1}")
