"""Facts about the GEMM inside an operator call that every operator's `problem` needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
