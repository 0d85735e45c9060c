"""What operators with GEMMs share: facts that every `problem` needs, and the reduced sum of GEMMs.

Legend: M rows, N columns, K_i inner size of product i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from mkcompile.ops.problem import Problem


class ReducedSum(Protocol):
    """A call that reduces `sum_i x[i] @ w[i] + bias` over its group."""

    @property
    def x(self) -> Sequence[Tensor]: ...
    @property
    def w(self) -> Sequence[Tensor]: ...
    @property
    def bias(self) -> Tensor | None: ...
    @property
    def reduce_op(self) -> str: ...
    @property
    def world_size(self) -> int: ...


def reduced_sum(operator: str, call: ReducedSum) -> Problem:
    """The problem as far as the sum decides it: m rows on every rank, k summed over the products."""
    return Problem(
        operator=operator,
        m=static_size(call.x[0].shape[0]),
        n=static_size(call.w[0].shape[1]),
        k=sum(static_size(x_MK.shape[1]) for x_MK in call.x),
        world_size=call.world_size,
        dtype=dtype_name(call.x[0]),
        dtype_bytes=call.x[0].element_size(),
        num_gemms=len(call.x),
        weight_layout=common_layout(call.w),
        has_bias=call.bias is not None,
        reduce_op=call.reduce_op,
    )


def static_size(size: int | torch.SymInt) -> int:
    """The size, or 0 where it is symbolic."""
    return size if isinstance(size, int) else 0


def weight_layout(w_KN: Tensor) -> str:
    """`nk` where the memory is [N, K] with K contiguous (a Linear's weight, transposed as a view), `kn` where it is
    [K, N] with N contiguous, else `other`."""
    stride_k, stride_n = w_KN.stride()
    if stride_k == 1:
        return "nk"
    return "kn" if stride_n == 1 else "other"


def common_layout(w: Sequence[Tensor]) -> str:
    """The layout that all weights share, else `other`."""
    layouts = {weight_layout(w_KN) for w_KN in w}
    return layouts.pop() if len(layouts) == 1 else "other"


def dtype_name(tensor: Tensor) -> str:
    """`bfloat16`, `float16`, `float32`, ..."""
    return str(tensor.dtype).removeprefix("torch.")
