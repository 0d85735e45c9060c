"""What a model of the zoo is built for, and the tensors that it is built from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SEQUENCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One cell of the matrix on one rank.

    `rounding` is the dtype that weights and inputs are rounded to, `dtype` the one they are kept and computed in:
    the two differ only where the model serves as the truth.
    """

    rank: int
    world_size: int
    rounding: torch.dtype
    dtype: torch.dtype
    batch: int
    trains: bool

    def draw(self, *shape: int, seed: int, scale: float = 1.0) -> Tensor:
        """Normal numbers that depend on the seed alone, rounded to `rounding`. Shapes: as asked."""
        generator = torch.Generator().manual_seed(seed)
        return (scale * torch.randn(*shape, generator=generator)).to(self.rounding).to(self.dtype)

    def parameter(self, *shape: int, seed: int) -> nn.Parameter:
        """A weight [.., fan-in] whose products keep the size of their inputs."""
        return nn.Parameter(self.draw(*shape, seed=seed, scale=shape[-1] ** -0.5))


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A model on one rank; `outputs(call)` calls the module, or its compiled form, on its inputs.

    `inputs` are those that a gradient is wanted of.
    """

    module: nn.Module
    outputs: Callable[[Callable[..., Any]], Tensor]
    inputs: tuple[Tensor, ...] = ()

    @staticmethod
    def of(module: nn.Module, x: Tensor) -> Instance:
        """A module of one input and one output."""
        return Instance(module=module, outputs=lambda call: call(x), inputs=(x,) if x.requires_grad else ())


Builder = Callable[[Setting], Instance]
