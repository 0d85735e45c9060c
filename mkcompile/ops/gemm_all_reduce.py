"""GEMM + all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mkcompile.ops import _scaled, by_hand, checks, collectives
from mkcompile.ops._gemms import reduced_sum
from mkcompile.ops.groups import AnyGroup
from mkcompile.ops.problem import Problem
from mkcompile.ops.registry import register


@register
@dataclass(frozen=True, slots=True)
class GemmAllReduce:
    """`all_reduce(sum_i x[i] @ w[i] + bias)`.

    Shapes: x[i] [M, K_i], w[i] [K_i, N] with any strides, bias [N] -> [M, N], the same on every rank. The bias is
    this rank's share: it is added before the reduction, as by `addmm` in front of an all-reduce.
    """

    NAME: ClassVar[str] = "gemm_all_reduce"
    SCHEMA: ClassVar[str] = (
        "(Tensor[] x, Tensor[] w, Tensor? bias, str reduce_op, int world_size, str group, str plan_key) -> Tensor"
    )

    x: Sequence[Tensor]
    w: Sequence[Tensor]
    bias: Tensor | None
    reduce_op: str
    world_size: int
    group: str
    plan_key: str

    def check(self) -> None:
        """Raises: OperatorInputError, GroupError."""
        checks.check_gemms(self.NAME, self.x, self.w, self.bias)
        checks.check_reduce_op(self.NAME, self.reduce_op)
        checks.check_group(self.NAME, self.group, self.world_size)

    def reference(self) -> Tensor:
        """GEMMs by ATen, then one all-reduce."""
        return collectives.all_reduce(collectives.sum_of_gemms(self.x, self.w, self.bias), self.reduce_op, self.group)

    def fake(self) -> Tensor:
        """An empty [M, N]."""
        return self.x[0].new_empty((self.x[0].shape[0], self.w[0].shape[1]))

    def problem(self) -> Problem:
        """m rows on every rank, k summed over the products."""
        return reduced_sum(self.NAME, self)


@register
@dataclass(frozen=True, slots=True)
class GemmAllReduceAdd:
    """`residual += GemmAllReduce(..)`: the reduced sum is rounded to the residual's dtype, then added, rounded again.

    Shapes: residual [M, N], contiguous, of the inputs' dtype and none of their memory; the others as there. A call that
    is refused leaves the residual as it was; where a peer's part does not come in time, its content is undefined.
    """

    NAME: ClassVar[str] = "gemm_all_reduce_add"
    SCHEMA: ClassVar[str] = (
        "(Tensor(a!) residual, Tensor[] x, Tensor[] w, Tensor? bias, str reduce_op, int world_size, str group, "
        "str plan_key) -> ()"
    )

    residual: Tensor
    x: Sequence[Tensor]
    w: Sequence[Tensor]
    bias: Tensor | None
    reduce_op: str
    world_size: int
    group: str
    plan_key: str

    def addend(self) -> GemmAllReduce:
        """The call whose result is added."""
        return GemmAllReduce(self.x, self.w, self.bias, self.reduce_op, self.world_size, self.group, self.plan_key)

    def check(self) -> None:
        """Raises: OperatorInputError, GroupError."""
        self.addend().check()
        self.check_residual()

    def check_residual(self) -> None:
        """Raises: OperatorInputError."""
        checks.check_residual(self.NAME, self.residual, (self.x[0].shape[0], self.w[0].shape[1]), self.x[0])

    def reference(self) -> Tensor:
        """The reference of what is added, and the addition. Returns the residual."""
        return self.residual.add_(self.addend().reference())

    def fake(self) -> None:
        """No result."""

    def problem(self) -> Problem:
        """That of `GemmAllReduce`."""
        return self.addend().problem()


@register
@dataclass(frozen=True, slots=True)
class ScaledGemmAllReduce:
    """`all_reduce(sum_i (x[i] * x_scale[i]) @ (w[i] * w_scale[i]) + bias)` of 8-bit floats.

    Shapes: as `GemmAllReduce`; scales as in `ops/_scaled.py`. Bias and result have `out_dtype`, in which the products
    are summed and reduced, too.
    """

    NAME: ClassVar[str] = "scaled_gemm_all_reduce"
    SCHEMA: ClassVar[str] = (
        "(Tensor[] x, Tensor[] w, Tensor[] x_scale, Tensor[] w_scale, Tensor? bias, ScalarType out_dtype, "
        "bool fast_accum, str reduce_op, int world_size, str group, str plan_key) -> Tensor"
    )

    x: Sequence[Tensor]
    w: Sequence[Tensor]
    x_scale: Sequence[Tensor]
    w_scale: Sequence[Tensor]
    bias: Tensor | None
    out_dtype: torch.dtype
    fast_accum: bool
    reduce_op: str
    world_size: int
    group: str
    plan_key: str

    def check(self) -> None:
        """Raises: OperatorInputError, GroupError."""
        _scaled.check_sum(self.NAME, self)
        checks.check_reduce_op(self.NAME, self.reduce_op)
        checks.check_group(self.NAME, self.group, self.world_size)

    def reference(self) -> Tensor:
        """Scaled products by ATen, then one all-reduce."""
        return collectives.all_reduce(_scaled.total(self), self.reduce_op, self.group)

    def fake(self) -> Tensor:
        """An empty [M, N]."""
        return self.x[0].new_empty((self.x[0].shape[0], self.w[0].shape[1]), dtype=self.out_dtype)

    def problem(self) -> Problem:
        """That of `GemmAllReduce`, of 8-bit operands."""
        return _scaled.sum_problem(GemmAllReduce.NAME, self)


def gemm_all_reduce(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, reduce_op: str = "sum", group: AnyGroup = None
) -> Tensor:
    """`all_reduce(x @ w + bias)` over the group: a row-parallel linear layer with its reduction. Inference only.

    Shapes: x [.., K], w [K, N] (a Linear's weight is `linear.weight.t()`), bias [N], added on every rank before the
    reduction; the result [.., N] is the same on every rank. `group` is a name, a ProcessGroup, a one-dimensional
    DeviceMesh, or None for all ranks.
    Raises: OperatorInputError, GroupError, PlanMismatchError.
    """
    name = GemmAllReduce.NAME
    group_name, world_size = by_hand.group_and_size(name, group)
    out_MN = by_hand.run(GemmAllReduce([by_hand.rows(name, x)], [w], bias, reduce_op, world_size, group_name, ""))
    out: Tensor = out_MN.reshape(*x.shape[:-1], w.shape[1])
    return out
