"""GEMM + reduce-scatter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from mkcompile.ops import _scaled, by_hand, checks, collectives
from mkcompile.ops._gemms import reduced_sum, static_size
from mkcompile.ops.groups import AnyGroup
from mkcompile.ops.problem import Problem
from mkcompile.ops.registry import register


@register
@dataclass(frozen=True, slots=True)
class GemmReduceScatter:
    """This rank's slice along `dim` of `sum over ranks of (sum_i x[i] @ w[i] + bias)`.

    Shapes: x[i] [M, K_i], w[i] [K_i, N] with any strides, bias [N]; the product [M, N] is read as `shape` (as many
    elements, last dimension N) and scattered along `dim`: [.., S, ..] -> [.., S / world_size, ..]. The bias is this
    rank's share: it is added before the reduction.
    """

    NAME: ClassVar[str] = "gemm_reduce_scatter"
    SCHEMA: ClassVar[str] = (
        "(Tensor[] x, Tensor[] w, Tensor? bias, SymInt[] shape, int dim, str reduce_op, int world_size, str group, "
        "str plan_key) -> Tensor"
    )

    x: Sequence[Tensor]
    w: Sequence[Tensor]
    bias: Tensor | None
    shape: Sequence[int]
    dim: int
    reduce_op: str
    world_size: int
    group: str
    plan_key: str

    def check(self) -> None:
        """Raises: OperatorInputError, GroupError."""
        checks.check_gemms(self.NAME, self.x, self.w, self.bias)
        checks.check_reduce_op(self.NAME, self.reduce_op)
        product = self.x[0].shape[0], self.w[0].shape[1]
        checks.check_scatter(self.NAME, self.shape, self.dim, product, self.world_size)
        checks.check_group(self.NAME, self.group, self.world_size)

    def reference(self) -> Tensor:
        """GEMMs by ATen, then one reduce-scatter."""
        product = collectives.sum_of_gemms(self.x, self.w, self.bias).reshape(self.shape)
        return collectives.reduce_scatter(product, self.dim, self.reduce_op, self.world_size, self.group)

    def fake(self) -> Tensor:
        """An empty tensor of this rank's slice."""
        return self.x[0].new_empty(scattered(self.shape, self.dim, self.world_size))

    def problem(self) -> Problem:
        """m rows computed by every rank, k summed over the products."""
        return _scattered_problem(reduced_sum(self.NAME, self), self.shape, self.dim)


@register
@dataclass(frozen=True, slots=True)
class GemmReduceScatterAdd:
    """`residual += GemmReduceScatter(..)`: the reduced slice is rounded to the residual's dtype, then added and rounded
    again.

    Shapes: residual [.., S / world_size, ..], contiguous, of the inputs' dtype and none of their memory; the others as
    there. A call that is refused leaves the residual as it was; where a peer's part does not come in time, its content
    is undefined.
    """

    NAME: ClassVar[str] = "gemm_reduce_scatter_add"
    SCHEMA: ClassVar[str] = (
        "(Tensor(a!) residual, Tensor[] x, Tensor[] w, Tensor? bias, SymInt[] shape, int dim, str reduce_op, "
        "int world_size, str group, str plan_key) -> ()"
    )

    residual: Tensor
    x: Sequence[Tensor]
    w: Sequence[Tensor]
    bias: Tensor | None
    shape: Sequence[int]
    dim: int
    reduce_op: str
    world_size: int
    group: str
    plan_key: str

    def addend(self) -> GemmReduceScatter:
        """The call whose result is added."""
        return GemmReduceScatter(
            self.x, self.w, self.bias, self.shape, self.dim, self.reduce_op, self.world_size, self.group, self.plan_key
        )

    def check(self) -> None:
        """Raises: OperatorInputError, GroupError."""
        self.addend().check()
        self.check_residual()

    def check_residual(self) -> None:
        """Raises: OperatorInputError."""
        checks.check_residual(self.NAME, self.residual, scattered(self.shape, self.dim, self.world_size), self.x[0])

    def reference(self) -> Tensor:
        """The reference of what is added, and the addition. Returns the residual."""
        return self.residual.add_(self.addend().reference())

    def fake(self) -> None:
        """No result."""

    def problem(self) -> Problem:
        """That of `GemmReduceScatter`."""
        return self.addend().problem()


@register
@dataclass(frozen=True, slots=True)
class ScaledGemmReduceScatter:
    """`GemmReduceScatter` of scaled 8-bit floats.

    Shapes: as there; scales as in `ops/_scaled.py`. Bias and result have `out_dtype`, in which the products are summed
    and reduced, too.
    """

    NAME: ClassVar[str] = "scaled_gemm_reduce_scatter"
    SCHEMA: ClassVar[str] = (
        "(Tensor[] x, Tensor[] w, Tensor[] x_scale, Tensor[] w_scale, Tensor? bias, ScalarType out_dtype, "
        "bool fast_accum, SymInt[] shape, int dim, str reduce_op, int world_size, str group, str plan_key) -> Tensor"
    )

    x: Sequence[Tensor]
    w: Sequence[Tensor]
    x_scale: Sequence[Tensor]
    w_scale: Sequence[Tensor]
    bias: Tensor | None
    out_dtype: torch.dtype
    fast_accum: bool
    shape: Sequence[int]
    dim: int
    reduce_op: str
    world_size: int
    group: str
    plan_key: str

    def check(self) -> None:
        """Raises: OperatorInputError, GroupError."""
        _scaled.check_sum(self.NAME, self)
        checks.check_reduce_op(self.NAME, self.reduce_op)
        product = self.x[0].shape[0], self.w[0].shape[1]
        checks.check_scatter(self.NAME, self.shape, self.dim, product, self.world_size)
        checks.check_group(self.NAME, self.group, self.world_size)

    def reference(self) -> Tensor:
        """Scaled products by ATen, then one reduce-scatter."""
        product = _scaled.total(self).reshape(self.shape)
        return collectives.reduce_scatter(product, self.dim, self.reduce_op, self.world_size, self.group)

    def fake(self) -> Tensor:
        """An empty tensor of this rank's slice."""
        return self.x[0].new_empty(scattered(self.shape, self.dim, self.world_size), dtype=self.out_dtype)

    def problem(self) -> Problem:
        """That of `GemmReduceScatter`, of 8-bit operands."""
        return _scattered_problem(_scaled.sum_problem(GemmReduceScatter.NAME, self), self.shape, self.dim)


def scattered(shape: Sequence[int], dim: int, world_size: int) -> list[int]:
    """The shape of one rank's slice."""
    return [size // world_size if i == dim else size for i, size in enumerate(shape)]


def _scattered_problem(base: Problem, shape: Sequence[int], dim: int) -> Problem:
    outer = static_size(prod(shape[:dim]))
    return replace(base, outer=outer, dim="columns" if dim == len(shape) - 1 else "rows")


def gemm_reduce_scatter(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    dim: int = 0,
    reduce_op: str = "sum",
    group: AnyGroup = None,
) -> Tensor:
    """This rank's slice along `dim` of the sum over the group of `x @ w + bias`. Inference only.

    Shapes: x [.., K], w [K, N] (a Linear's weight is `linear.weight.t()`), bias [N], added on every rank before the
    reduction; the product [.., N] is cut along `dim`, a dimension of it (negative ones count from the last) that the
    number of ranks divides. `group` is a name, a ProcessGroup, a one-dimensional DeviceMesh, or None for all ranks.
    Raises: OperatorInputError, GroupError, PlanMismatchError.
    """
    name = GemmReduceScatter.NAME
    group_name, world_size = by_hand.group_and_size(name, group)
    x_MK = by_hand.rows(name, x)
    checks.check_tensor(name, "w", w, 2)
    shape = [*x.shape[:-1], w.shape[1]]
    counted = dim + len(shape) if dim < 0 else dim
    call = GemmReduceScatter([x_MK], [w], bias, shape, counted, reduce_op, world_size, group_name, "")
    out: Tensor = by_hand.run(call)
    return out
