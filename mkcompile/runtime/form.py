"""An operator call as a kernel sees it: which kernel, which operands in which layout, which rows go to whom.

What is decided here from sizes, dtypes and arguments is the same on every rank. Strides and addresses may differ by
rank, so an operand that the copy engine can't read is copied, and never a reason not to launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from mkcompile.ops.gemm_all_reduce import GemmAllReduce
from mkcompile.ops.gemm_reduce_scatter import GemmReduceScatter, scattered
from mkcompile.ops.registry import Call
from mkcompile.plan import key
from mkcompile.runtime.abi import MAX_TERMS, MAX_WORLD
from mkcompile.runtime.kernel_config import Broadcast, DtypeName, KernelConfig, WeightLayout
from mkcompile.runtime.tile_schedule import LaunchSize

DTYPES: dict[torch.dtype, DtypeName] = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
_ALIGNED_ELEMENTS = 8
ALIGNED_BYTES = 16

Reduction = GemmReduceScatter | GemmAllReduce


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One call's kernel and sizes, but for tile and schedule. `out_shape` is the shape of this rank's result."""

    config: KernelConfig
    size: LaunchSize
    out_shape: tuple[int, ...]
    scale: float

    @property
    def out_rows(self) -> int:
        """Rows of the result as a matrix."""
        return prod(self.out_shape[:-1])


def staged(form: Form) -> Form:
    """The same call with its result in ordinary memory."""
    return replace(form, config=replace(form.config, broadcast="staged", stages=0))


def form_of(call: Call) -> Form | str:
    """The call's form, or why no kernel takes it: the same on every rank."""
    if not isinstance(call, (GemmReduceScatter, GemmAllReduce)):
        return f"{call.NAME} has no kernel yet"
    m, n, k = call.x[0].shape[0], call.w[0].shape[1], [x_MK.shape[1] for x_MK in call.x]
    broadcast: Broadcast = "none"
    if isinstance(call, GemmReduceScatter):
        if call.dim == len(call.shape) - 1:
            return "scattering the last dimension has no kernel"
        out_shape, segments = scattered(call.shape, call.dim, call.world_size), prod(call.shape[: call.dim])
    else:
        out_shape, segments = [m, n], 1
        broadcast = "direct" if key.STAYS in key.facts_of(call.plan_key) else "staged"
    if len(k) > MAX_TERMS:
        return f"one kernel sums at most {MAX_TERMS} products, not {len(k)}"
    refusal = refusal_of(call.x[0].dtype, call.world_size, [m], [n, *k])
    if refusal:
        return refusal
    return Form(
        config=KernelConfig(
            operator=call.NAME,  # type: ignore[arg-type]
            broadcast=broadcast,
            dtype=DTYPES[call.x[0].dtype],
            weight_layout=weight_layout(call.w),
            has_bias=call.bias is not None,
        ),
        size=LaunchSize(m=m, n=n, k=sum(k), world=call.world_size, segments=segments),
        out_shape=tuple(out_shape),
        scale=1.0 / call.world_size if call.reduce_op == "avg" else 1.0,
    )


def refusal_of(dtype: torch.dtype, world_size: int, rows: Sequence[int], aligned: Sequence[int]) -> str:
    """Why no kernel takes it, empty if one may. `aligned`: sizes that lie beside each other in memory: n and k."""
    if dtype not in DTYPES:
        return f"no kernel for {dtype}; use bfloat16 or float16"
    if not 2 <= world_size <= MAX_WORLD:
        return f"kernels join 2 to {MAX_WORLD} ranks, not {world_size}"
    if any(size % _ALIGNED_ELEMENTS for size in aligned):
        return f"n and k must be multiples of {_ALIGNED_ELEMENTS}"
    return "an empty product" if 0 in (*rows, *aligned) else ""


def weight_layout(w: Sequence[Tensor]) -> WeightLayout:
    """The layout in which the first weight can be read where it lies; `nk` (a Linear's weight) where none is."""
    return "kn" if _has_rows(w[0]) and not _has_rows(w[0].t()) else "nk"


def _has_rows(tensor: Tensor) -> bool:
    """Rows contiguous and a multiple of 16 bytes apart, at least their own length."""
    rows, columns = tensor.shape
    row_stride, column_stride = tensor.stride()
    if column_stride != 1 and columns != 1:
        return False
    return rows == 1 or (row_stride >= columns and row_stride % _ALIGNED_ELEMENTS == 0)


def as_rows(tensor: Tensor) -> Tensor:
    """The tensor where the copy engine can read it, else a copy."""
    if _has_rows(tensor) and tensor.data_ptr() % ALIGNED_BYTES == 0:
        return tensor
    return torch.empty_like(tensor, memory_format=torch.contiguous_format).copy_(tensor)


def as_weight(w_KN: Tensor, layout: WeightLayout) -> Tensor:
    """The weight as the kernel reads it, [N, K] or [K, N], or a copy."""
    return as_rows(w_KN.t() if layout == "nk" else w_KN)


def as_vector(bias: Tensor) -> Tensor:
    """The bias in one aligned piece, or a copy."""
    if bias.stride(0) == 1 and bias.data_ptr() % ALIGNED_BYTES == 0:
        return bias
    return torch.empty_like(bias, memory_format=torch.contiguous_format).copy_(bias)
