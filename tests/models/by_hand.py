"""Collectives written by hand: in inference `torch.distributed`'s own calls, in training the functional ones that have
a derivative."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.nn import functional

from tests.models.setting import SEQUENCE, Instance, Setting

HIDDEN, FEATURES = 64, 128


class _Weights(nn.Module):
    def __init__(self, setting: Setting) -> None:
        super().__init__()
        local = FEATURES // setting.world_size
        self.up = setting.parameter(HIDDEN, local, seed=10 + setting.rank)
        self.down = setting.parameter(local, HIDDEN, seed=20 + setting.rank)
        self.bias = nn.Parameter(setting.draw(HIDDEN, seed=30 + setting.rank, scale=0.1))


class InPlace(_Weights):
    """A reduced MLP, then a gathered and scattered one, then a list gather along the batch's second dimension."""

    def forward(self, x_BSH: Tensor) -> Tensor:
        world_size = dist.get_world_size()
        y_BSH = functional.relu(x_BSH @ self.up) @ self.down
        dist.all_reduce(y_BSH)
        y_BSH = y_BSH + x_BSH
        gathered = y_BSH.new_empty(world_size * y_BSH.shape[0], *y_BSH.shape[1:])
        dist.all_gather_into_tensor(gathered, y_BSH)
        z = functional.silu(gathered @ self.up) @ self.down + self.bias
        scattered = torch.empty_like(y_BSH)
        dist.reduce_scatter_tensor(scattered, z)
        pieces = [torch.empty_like(scattered) for _ in range(world_size)]
        dist.all_gather(pieces, scattered)
        return torch.cat(pieces, dim=1) @ self.up


class Functional(_Weights):
    """The gathered and scattered MLP, along the sequence, with functional collectives that have a derivative."""

    def forward(self, x_BSH: Tensor) -> Tensor:
        group = dist.group.WORLD
        gathered = funcol.all_gather_tensor_autograd(x_BSH, 1, group)
        y = functional.silu(gathered @ self.up) @ self.down + self.bias
        return x_BSH + funcol.reduce_scatter_tensor_autograd(y, "sum", 1, group)


def by_hand(setting: Setting) -> Instance:
    """One of the two, by whether it trains. Each rank has its own tokens."""
    module = Functional(setting) if setting.trains else InPlace(setting)
    x_BSH = setting.draw(setting.batch, SEQUENCE // setting.world_size, HIDDEN, seed=1 + setting.rank)
    x_BSH.requires_grad_(setting.trains)
    return Instance.of(module, x_BSH)
