"""An all-gather call as a kernel sees it. What is decided here is the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from mkcompile.ops.all_gather_gemm import FORM_INPUT, AllGatherGemm
from mkcompile.runtime import form as forms
from mkcompile.runtime.gather_abi import MAX_WEIGHTS
from mkcompile.runtime.gather_launch import GatherSize
from mkcompile.runtime.kernel_config import BLOCK_K, KernelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherForm:
    """One call's kernel and sizes, but for tile and schedule. `gathered_shape` is empty where it is not returned."""

    config: KernelConfig
    size: GatherSize
    gathered_shape: tuple[int, ...]

    @property
    def returned(self) -> bool:
        """Whether the gathered tensor is a result."""
        return bool(self.gathered_shape)

    @property
    def out_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of all results."""
        products = tuple((self.size.rows, n) for n in self.size.n)
        return (*products, self.gathered_shape) if self.returned else products


def gather_form_of(call: AllGatherGemm) -> GatherForm | str:
    """The call's form, or why no kernel takes it."""
    x, shape = call.x, tuple(call.x.shape)
    columns = call.dim == x.dim() - 1
    n = tuple(weight.shape[1] for weight in call.w)
    if any(form != FORM_INPUT for form in call.forms):
        return "products other than gathered @ weight have no kernel"
    if len(n) > MAX_WEIGHTS:
        return f"one kernel has at most {MAX_WEIGHTS} products of one gathered tensor, not {len(n)}"
    if columns and shape[-1] % BLOCK_K:
        return f"gathered columns must be multiples of {BLOCK_K} on each rank, not {shape[-1]}"
    refusal = forms.refusal_of(x.dtype, call.world_size, shape, [*n, shape[-1]])
    if refusal:
        return refusal
    gathered = tuple(size * call.world_size if i == call.dim else size for i, size in enumerate(shape))
    return GatherForm(
        config=KernelConfig(
            operator="all_gather_gemm",
            dtype=forms.DTYPES[x.dtype],
            weight_layout=forms.weight_layout(call.w),
            has_bias=any(one is not None for one in call.bias),
        ),
        size=GatherSize(
            segments=1 if columns else prod(shape[: call.dim]),
            segment_rows=prod(shape[:-1]) if columns else prod(shape[call.dim : -1]),
            k=shape[-1],
            n=n,
            world=call.world_size,
            columns=columns,
        ),
        gathered_shape=gathered if call.return_gathered else (),
    )


def as_shard(x: Tensor) -> Tensor:
    """The shard as a matrix in one aligned piece, or a copy."""
    if x.is_contiguous() and x.data_ptr() % forms.ALIGNED_BYTES == 0:
        return x.view(-1, x.shape[-1])
    return torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x).view(-1, x.shape[-1])
