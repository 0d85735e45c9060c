"""Megatron's f and g, and their sequence-parallel twins: collectives inside autograd functions.

Over all ranks (an empty group name) they call `torch.distributed` in place, as Megatron does, where torch compiles that
rightly; over a named group, functionally.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

# Inside an autograd function, torch 2.11 compiles in-place collectives to gradients of zero, with every backend, and
# refuses to trace `funcol.all_gather_tensor` along other dimensions than the first.
_IS_2_11 = torch.__version__.startswith("2.11.")


def all_reduce(x: Tensor, group: str = "") -> Tensor:
    """The sum over the ranks."""
    if group or _IS_2_11:
        return funcol.all_reduce(x.contiguous(), "sum", group or dist.group.WORLD)
    out = x.contiguous().clone()
    dist.all_reduce(out)
    return out


def all_gather(x: Tensor, dim: int = 0, group: str = "") -> Tensor:
    """The ranks' tensors one after the other along `dim`."""
    if not group and not dim and not _IS_2_11:
        out = x.new_empty(x.shape[0] * dist.get_world_size(), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous())
        return out
    where = group or dist.group.WORLD
    if not _IS_2_11:
        return funcol.all_gather_tensor(x.contiguous(), dim, where)
    gathered = funcol.all_gather_tensor(x.contiguous(), 0, where)
    if not dim:
        return gathered
    world_size = dist.distributed_c10d._get_group_size_by_name(group) if group else dist.get_world_size()
    if all(size == 1 for size in x.shape[:dim]):  # as torch does it
        return gathered.view(*x.shape[:dim], world_size * x.shape[dim], *x.shape[dim + 1 :])
    return torch.cat(gathered.chunk(world_size), dim)


def reduce_scatter(x: Tensor, dim: int = 0, group: str = "") -> Tensor:
    """This rank's slice along `dim` of the sum over the ranks."""
    if group or dim or _IS_2_11:
        return funcol.reduce_scatter_tensor(x.contiguous(), "sum", dim, group or dist.group.WORLD)
    out = x.new_empty(x.shape[0] // dist.get_world_size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous())
    return out


class CopyToRegion(torch.autograd.Function):
    """Identity forward, all-reduce backward. `dim` is for its twin's sake."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_reduce(grad, ctx.group), None, None


class ReduceFromRegion(torch.autograd.Function):
    """All-reduce forward, identity backward. `dim` is for its twin's sake."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: str) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class GatherFromSequence(torch.autograd.Function):
    """All-gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: str) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(grad, ctx.dim, ctx.group), None, None


class ScatterToSequence(torch.autograd.Function):
    """Reduce-scatter forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: str) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.dim, ctx.group), None, None
