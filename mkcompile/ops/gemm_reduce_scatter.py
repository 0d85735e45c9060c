"""GEMM + reduce-scatter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from torch import Tensor

from mkcompile.errors import OperatorInputError
from mkcompile.ops import by_hand, checks, collectives
from mkcompile.ops._gemms import common_layout, dtype_name, static_size
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
        checks.check_dim(self.NAME, self.dim, len(self.shape))
        rows, columns = self.x[0].shape[0], self.w[0].shape[1]
        if len(self.shape) < 2 or self.shape[-1] != columns or prod(self.shape[:-1]) != rows:
            raise OperatorInputError(
                f"{self.NAME}: shape {tuple(self.shape)} does not describe a product of {rows} x {columns}"
            )
        what = f"dimension {self.dim} of {tuple(self.shape)}"
        checks.check_divides(self.NAME, what, self.shape[self.dim], self.world_size)
        checks.check_group(self.NAME, self.group, self.world_size)

    def reference(self) -> Tensor:
        """GEMMs by ATen, then one reduce-scatter."""
        product = collectives.sum_of_gemms(self.x, self.w, self.bias).reshape(self.shape)
        return collectives.reduce_scatter(product, self.dim, self.reduce_op, self.world_size, self.group)

    def fake(self) -> Tensor:
        """An empty tensor of this rank's slice."""
        sizes = [size // self.world_size if i == self.dim else size for i, size in enumerate(self.shape)]
        return self.x[0].new_empty(sizes)

    def problem(self) -> Problem:
        """m rows computed by every rank, k summed over the products."""
        return Problem(
            operator=self.NAME,
            m=static_size(self.x[0].shape[0]),
            n=static_size(self.w[0].shape[1]),
            k=sum(static_size(x_MK.shape[1]) for x_MK in self.x),
            world_size=self.world_size,
            dtype=dtype_name(self.x[0]),
            dtype_bytes=self.x[0].element_size(),
            outer=static_size(prod(self.shape[: self.dim])),
            num_gemms=len(self.x),
            dim="columns" if self.dim == len(self.shape) - 1 else "rows",
            weight_layout=common_layout(self.w),
            has_bias=self.bias is not None,
            reduce_op=self.reduce_op,
        )


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
