"""A Llama written with functional collectives, tensor and sequence parallel, whose graphs passes can be timed on.

Legend: B batch, S sequence (the whole one), T sequence of this rank, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEAD, HIDDEN, BATCH, SEQUENCE = 128, 8, 256, 2, 32


def gathered(x_BTD: Tensor, group: str) -> Tensor:
    """[B, S, D]; joined here, since torch 2.11 compiles no gather along another dimension than the first."""
    parts = funcol.all_gather_tensor(x_BTD, 0, group)
    return torch.cat(parts.chunk(parts.shape[0] // x_BTD.shape[0]), 1)


class GatherSequence(torch.autograd.Function):
    """All-gather along the sequence; the gradient is reduce-scattered."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, group: str) -> Tensor:
        ctx.group = group
        return gathered(x_BTD, group)

    @staticmethod
    def backward(ctx: Any, dy_BSD: Tensor) -> tuple[Tensor, None]:
        return funcol.reduce_scatter_tensor(dy_BSD, "sum", 1, ctx.group), None


class ScatterSequence(torch.autograd.Function):
    """Reduce-scatter along the sequence; the gradient is all-gathered."""

    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, group: str) -> Tensor:
        ctx.group = group
        return funcol.reduce_scatter_tensor(x_BSD, "sum", 1, group)

    @staticmethod
    def backward(ctx: Any, dy_BTD: Tensor) -> tuple[Tensor, None]:
        return gathered(dy_BTD, ctx.group), None


class Block(nn.Module):
    """One layer: attention and a gated FFN, each behind a norm, on this rank's share of heads and features."""

    def __init__(self, world_size: int, group: str) -> None:
        super().__init__()
        self.group = group
        share, features = WIDTH // world_size, HIDDEN // world_size
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.q, self.k, self.v = (nn.Linear(WIDTH, share, bias=False) for _ in range(3))
        self.o = nn.Linear(share, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, features, bias=False) for _ in range(2))
        self.down = nn.Linear(features, WIDTH, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        full = GatherSequence.apply(self.norms[0](x_BTD), self.group)
        heads = [one(full).unflatten(-1, (-1, HEAD)).transpose(1, 2) for one in (self.q, self.k, self.v)]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x_BTD = x_BTD + ScatterSequence.apply(self.o(mixed), self.group)
        full = GatherSequence.apply(self.norms[1](x_BTD), self.group)
        hidden = functional.silu(self.gate(full)) * self.up(full)
        out: Tensor = x_BTD + ScatterSequence.apply(self.down(hidden), self.group)
        return out


def llama(num_layers: int, world_size: int, group: str) -> nn.Sequential:
    """The layers in a row."""
    return nn.Sequential(*(Block(world_size, group) for _ in range(num_layers)))


def example_input(world_size: int) -> Tensor:
    """[B, T, D]."""
    return torch.randn(BATCH, SEQUENCE // world_size, WIDTH, requires_grad=True)
