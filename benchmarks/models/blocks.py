"""Llama-style blocks under DTensor tensor parallelism, made on the device with no whole weight anywhere.

Legend: B samples, T tokens (of this rank where the sequence is sharded), H hidden features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from .cells import MODELS, WHOLE, Cell, Sizes
from .huggingface import inference

_SEED = 2026


class Attention(nn.Module):
    """Causal attention with grouped queries; the number of local heads follows from the local projections."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head = sizes.head
        self.grouped = sizes.heads != sizes.kv_heads
        self.q = nn.Linear(sizes.hidden, sizes.heads * sizes.head, bias=False)
        self.k, self.v = (nn.Linear(sizes.hidden, sizes.kv_heads * sizes.head, bias=False) for _ in range(2))
        self.o = nn.Linear(sizes.heads * sizes.head, sizes.hidden, bias=False)

    def forward(self, x_BTH: Tensor) -> Tensor:
        q, k, v = (one(x_BTH).unflatten(-1, (-1, self.head)).transpose(1, 2) for one in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(sizes.hidden, sizes.features, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.features, sizes.hidden, bias=False)

    def forward(self, x_BTH: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.gate(x_BTH)) * self.up(x_BTH))
        return out


class Block(nn.Module):
    """Attention and FFN, each behind an RMSNorm and beside a residual."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(sizes.hidden, eps=1e-5)
        self.attention = Attention(sizes)
        self.norm2 = nn.RMSNorm(sizes.hidden, eps=1e-5)
        self.ffn = SwiGLU(sizes)

    def forward(self, x_BTH: Tensor) -> Tensor:
        x_BTH = x_BTH + self.attention(self.norm1(x_BTH))
        out: Tensor = x_BTH + self.ffn(self.norm2(x_BTH))
        return out


def _plan(form: str) -> dict[str, ParallelStyle]:
    columns = ("attention.q", "attention.k", "attention.v", "ffn.gate", "ffn.up")
    rows = ("attention.o", "ffn.down")
    if form == "all-reduce":
        return {**dict.fromkeys(columns, ColwiseParallel()), **dict.fromkeys(rows, RowwiseParallel())}
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    normed = SequenceParallel(use_local_output=True)
    return {
        **dict.fromkeys(columns, ColwiseParallel()),
        **dict.fromkeys(rows, RowwiseParallel(output_layouts=Shard(1))),
        **dict.fromkeys(("norm1", "norm2"), normed),
        **dict.fromkeys(("attention", "ffn"), gathered),
    }


def _fill(parameter: Tensor, seed: int) -> None:
    """Norms are near one; a weight's columns have length one. Shards differ by rank, what is replicated does not."""
    sharded = isinstance(parameter, DTensor) and any(one.is_shard() for one in parameter.placements)
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    rank = parameter.device_mesh.get_local_rank() if isinstance(parameter, DTensor) and sharded else 0
    generator = torch.Generator(local.device).manual_seed(_SEED + 1000 * seed + rank)
    with torch.no_grad():
        if parameter.dim() == 1:
            local.uniform_(0.9, 1.1, generator=generator)
        else:
            local.normal_(0.0, 1 / math.sqrt(parameter.shape[1]), generator=generator)


def parallel_stack(sizes: Sizes, form: str, mesh: DeviceMesh, dtype: torch.dtype) -> nn.Sequential:
    """The blocks, sharded, on the meta device."""
    with torch.device("meta"):
        stack = nn.Sequential(*(Block(sizes).to(dtype) for _ in range(sizes.layers)))
    for block in stack:
        parallelize_module(block, mesh, _plan(form))
    return stack


def stack_of(sizes: Sizes, form: str, mesh: DeviceMesh, dtype: torch.dtype) -> nn.Sequential:
    """The blocks on the mesh's device, weights drawn there."""
    stack = parallel_stack(sizes, form, mesh, dtype)
    stack.to_empty(device=mesh.device_type)
    for seed, parameter in enumerate(stack.parameters()):
        _fill(parameter, seed)
    return stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A module, its input, and the gradient of its result; `trains`: the input is one that has a gradient.

    `again` makes the same once more, of a module that can't be copied: None for one that can.
    """

    module: nn.Module
    x: Tensor
    dy: Tensor
    trains: bool = True
    again: Callable[[], Workload] | None = None

    def differentiated(self) -> dict[str, Tensor]:
        """What gradients are taken of."""
        return {"x": self.x, **dict(self.module.named_parameters())}


def workload(cell: Cell, mesh: DeviceMesh, dtype: torch.dtype) -> Workload:
    """The cell's blocks and their input, which is this rank's part of the sequence in the sequence-parallel form."""
    if cell.model in WHOLE:
        whole, ids = inference(cell.model, cell.batch, cell.tokens, mesh, dtype)
        return Workload(module=whole, x=ids, dy=ids, trains=False, again=partial(workload, cell, mesh, dtype))
    sizes = MODELS[cell.model]
    module = stack_of(sizes, cell.form, mesh, dtype)
    sharded = cell.form == "sequence"
    length, rank = (cell.tokens // mesh.size(), mesh.get_local_rank()) if sharded else (cell.tokens, 0)
    generator = torch.Generator(mesh.device_type).manual_seed(_SEED + rank)
    x, dy = (
        torch.randn(cell.batch, length, sizes.hidden, generator=generator, device=mesh.device_type).to(dtype)
        for _ in range(2)
    )
    return Workload(module=module, x=x.requires_grad_(), dy=dy)
