"""What the references are made of: functional collectives, summed GEMMs, activations.

All of them work on CPU tensors over gloo and on CUDA tensors over NCCL, and none of them mutates its input.

16-bit sums: each rank's value is sent as it is, its owner adds all of them in fp32 in rank order and rounds once. A
library's all-reduce rounds after every addition, so that more than two ranks would lose what operators promise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mkcompile.ops.groups import find

_c10d = torch.ops._c10d_functional

ACTIVATIONS = ("relu", "relu2", "gelu", "gelu_tanh", "silu")


def _wait(pending: Tensor) -> Tensor:
    complete: Tensor = _c10d.wait_tensor(pending)
    return complete


def all_reduce(x: Tensor, reduce_op: str, group: str) -> Tensor:
    """Sum or average of `x` over the group, complete when it returns. Shapes: any, kept."""
    world_size = find(group).size()
    if not _rounds_often(x, world_size):
        return _wait(_c10d.all_reduce(x.contiguous(), reduce_op, group))
    padding = -x.numel() % world_size
    flat = torch.nn.functional.pad(x.reshape(-1), (0, padding))
    own = _round_once(flat, reduce_op, world_size, group)
    return _wait(_c10d.all_gather_into_tensor(own, world_size, group))[: x.numel()].reshape(x.shape)


def all_gather(x: Tensor, dim: int, world_size: int, group: str) -> Tensor:
    """The ranks' tensors laid one after the other along `dim`. Shapes: [.., S, ..] -> [.., world_size * S, ..]."""
    # 8-bit floats travel as bytes: gloo doesn't know them
    as_bytes = x.is_floating_point() and x.element_size() == 1
    sent = x.contiguous().view(torch.uint8) if as_bytes else x.contiguous()
    gathered = _wait(_c10d.all_gather_into_tensor(sent, world_size, group))
    if dim != 0:
        gathered = torch.cat(gathered.chunk(world_size, 0), dim)
    return gathered.view(x.dtype) if as_bytes else gathered


def reduce_scatter(x: Tensor, dim: int, reduce_op: str, world_size: int, group: str) -> Tensor:
    """This rank's slice along `dim` of the sum over the group. Shapes: [.., S, ..] -> [.., S / world_size, ..]."""
    laid_out = x if dim == 0 else torch.cat(x.chunk(world_size, dim), 0)
    if _rounds_often(x, world_size):
        return _round_once(laid_out, reduce_op, world_size, group)
    scattered = _c10d.reduce_scatter_tensor(laid_out.contiguous(), reduce_op, world_size, group)
    return _wait(scattered)


def _rounds_often(x: Tensor, world_size: int) -> bool:
    """Would a library's sum of `x` be rounded more than once?"""
    return x.element_size() == 2 and world_size > 2


def _round_once(x: Tensor, reduce_op: str, world_size: int, group: str) -> Tensor:
    """This rank's part along dim 0 of the reduced tensor; as many bytes cross the links as in a reduce-scatter."""
    sizes = [x.shape[0] // world_size] * world_size
    first, *others = _wait(_c10d.all_to_all_single(x.contiguous(), sizes, sizes, group)).chunk(world_size)
    total = first.float()
    for one in others:
        total += one
    return (total / world_size if reduce_op == "avg" else total).to(x.dtype)


def sum_of_gemms(x: Sequence[Tensor], w: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """`sum_i x[i] @ w[i] + bias`, each product in the inputs' dtype. Shapes: x[i] [M, K_i], w[i] [K_i, N], bias [N]."""
    out = torch.mm(x[0], w[0]) if bias is None else torch.addmm(bias, x[0], w[0])
    for x_MK, w_KN in zip(x[1:], w[1:], strict=True):
        out = out + torch.mm(x_MK, w_KN)
    return out


def activate(x: Tensor, activation: str) -> Tensor:
    """The named activation, computed in fp32 for 16-bit inputs and rounded once, as torch does. Shapes: any, kept."""
    if activation == "relu":
        return torch.relu(x)
    if activation == "relu2":
        return torch.relu(x).square()
    if activation == "gelu":
        return torch.nn.functional.gelu(x)
    if activation == "gelu_tanh":
        return torch.nn.functional.gelu(x, approximate="tanh")
    if activation == "silu":
        return torch.nn.functional.silu(x)
    raise ValueError(f"unknown activation {activation!r}; one of {', '.join(ACTIVATIONS)}")
