"""Small models with collectives. On the meta device: sizes are those of real ones, weights are not there.

B batch, S tokens, D features.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

BF16 = torch.bfloat16


class Mlp(nn.Module):
    """Two linears with an activation that no fused feed-forward network knows, so that each GEMM is a site."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False, dtype=BF16)
        self.down = nn.Linear(4 * width, width, bias=False, dtype=BF16)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x_BSD)))


def _meta_mlp(width: int) -> Mlp:
    with torch.device("meta"):
        return Mlp(width)


def _input(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=BF16, device="meta", requires_grad=True)


def tensor_parallel_mlp(*, width: int = 64, tokens: int = 32) -> tuple[nn.Module, tuple[Tensor]]:
    """One all-reduce in forward, one in backward."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(_meta_mlp(width), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model, (_input(1, tokens, width),)


class Holder(nn.Module):
    """Holds a module, so that its hooks are traced with it."""

    def __init__(self, held: nn.Module) -> None:
        super().__init__()
        self.held = held

    def forward(self, x_BSD: Tensor) -> Tensor:
        y_BSD: Tensor = self.held(x_BSD)
        return y_BSD


def sequence_parallel_mlp(*, width: int = 64, tokens: int = 32) -> tuple[nn.Module, tuple[Tensor]]:
    """A gather and a scatter in forward, and in backward."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {
        "held": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "held.up": ColwiseParallel(),
        "held.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    model = parallelize_module(Holder(_meta_mlp(width)), mesh, plan)
    return model, (_input(1, tokens // mesh.size(), width),)


class ByHand(nn.Module):
    """A linear whose product is summed over the ranks by a synchronous call; real weights."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x_SD: Tensor) -> Tensor:
        y_SD: Tensor = self.down(x_SD)
        dist.all_reduce(y_SD)
        return y_SD + 1


class Broken(ByHand):
    """The same with an asynchronous call, at which Dynamo ends the graph."""

    def forward(self, x_SD: Tensor) -> Tensor:
        y_SD: Tensor = self.down(x_SD)
        work = dist.all_reduce(y_SD, async_op=True)
        work.wait()
        return y_SD + 1


def by_hand() -> tuple[nn.Module, tuple[Tensor]]:
    """For the command line."""
    return ByHand(), (torch.ones(4, 16),)


def layers_of_its_own(layers: int) -> tuple[nn.Module, tuple[Tensor]]:
    """Builds one, whatever it is told."""
    return by_hand()


def on_a_mesh(width: int = 16) -> tuple[nn.Module, tuple[Tensor]]:
    """Needs a process group to build."""
    init_device_mesh("cpu", (4,))
    return by_hand()


def no_model() -> str:
    """What the command line must refuse."""
    return "nothing"
