"""What the tests of this folder share: a small tensor-parallel model, and a watch on operator calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.regions import CopyToRegion, ReduceFromRegion

ALWAYS: dict[str, Any] = {"mkernel.fuse": "always"}


class Layer(nn.Module):
    """A column-parallel and a row-parallel linear over a group: one all-reduce behind a GEMM each way.

    Nothing but GEMMs and collectives, so Inductor has little or no C++ to compile.
    """

    def __init__(self, group: str = "0", width: int = 16, hidden: int = 24) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(CopyToRegion.apply(x, 0, self.group))
        return ReduceFromRegion.apply(self.down(hidden), 0, self.group)


def same_on_all(*shape: int, seed: int = 7) -> Tensor:
    """An input that all ranks of a tensor-parallel group share."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@contextmanager
def watched_calls() -> Iterator[list[Any]]:
    """The operator calls in it: proof that the fused operators ran, and with which groups."""
    import mkcompile  # noqa: F401
    from mkcompile.ops import registry

    launcher = registry._REGISTRY.launcher
    calls: list[Any] = []

    def launch(call: Any) -> Any:
        calls.append(call)
        return launcher(call) if launcher else None

    registry.set_launcher(launch)
    try:
        yield calls
    finally:
        registry.set_launcher(launcher)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Eager against compiled: the largest difference in outputs and gradients, and the operator calls' groups."""

    worst: float
    groups: tuple[str, ...]


def compare(module: nn.Module, eager: Callable[[], list[Tensor]], compiled: Callable[[], list[Tensor]]) -> Compared:
    """Both give outputs (their gradients are then those of the sum of squares) or, without grad, only values."""
    want = _with_gradients(module, eager)
    with watched_calls() as calls:
        got = _with_gradients(module, compiled)
    assert len(want) == len(got)
    worst = max(float((a.double() - b.double()).abs().max()) for a, b in zip(want, got, strict=True))
    return Compared(worst=worst, groups=tuple(call.group for call in calls))


def _with_gradients(module: nn.Module, run: Callable[[], list[Tensor]]) -> list[Tensor]:
    module.zero_grad()
    outputs = run()
    if any(one.requires_grad for one in outputs):
        torch.stack([one.float().square().sum() for one in outputs]).sum().backward()
    gradients = [_local(parameter.grad) for parameter in module.parameters() if parameter.grad is not None]
    return [*(_local(one).detach().clone() for one in outputs), *(one.clone() for one in gradients)]


def _local(tensor: Any) -> Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
