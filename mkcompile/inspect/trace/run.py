"""What runs on each rank to be traced: an operator of a given size, or a compiled model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mkcompile import ops
from mkcompile.errors import OptionError
from mkcompile.inspect.commands.explain import call, load
from mkcompile.runtime import trace
from mkcompile.runtime.trace import RankTrace
from mkcompile.runtime.wiring import install

Say = Callable[[str], None]
_WARM_UP_CALLS = 3
# Steps right before those that are recorded: the ranks then run in step, and the link is awake.
_STEPS_BEFORE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Either `target`, a function as `explain` takes it, with its arguments, or an operator of `size` (m, n, k).

    `steps` are recorded, after as many as it takes to compile. m are the rows of the GEMM, for all_gather_gemm those of
    one rank.
    """

    target: str = ""
    given: dict[str, Any] = field(default_factory=dict)
    forward_only: bool = True
    operator: str = ""
    size: tuple[int, int, int] = (0, 0, 0)
    steps: int = 1


def traced(work: Work, rank: int, say: Say) -> list[RankTrace]:
    """Run it on this rank's device. Returns what was recorded, of which there is nothing where nothing was fused."""
    install(trace=True)
    device = torch.device("cuda", torch.cuda.current_device())
    step = _operator_step(work, rank, device) if work.operator else _model_step(work, device)
    for number in range(_WARM_UP_CALLS):
        say("compiling" if number == 0 else "warming up")
        step()
    torch.cuda.synchronize()
    dist.barrier()
    say(f"tracing {work.steps} step{'s' if work.steps > 1 else ''}")
    for _ in range(_STEPS_BEFORE):
        step()
    trace.clear()
    for _ in range(work.steps):
        step()
    found = trace.collect()
    say("reading the rings")
    return found


def _operator_step(work: Work, rank: int, device: torch.device) -> Callable[[], object]:
    """Shapes: x [m, k]; w [k, n] as a Linear's weight, transposed."""
    m, n, k = work.size
    assert dist.group.WORLD is not None
    group = dist.group.WORLD.group_name
    generator = torch.Generator(device=device).manual_seed(rank)
    x_MK = torch.randn(m, k, device=device, generator=generator).to(torch.bfloat16)
    w_KN = torch.randn(n, k, device=device, generator=generator).to(torch.bfloat16).t()
    operator: Callable[..., Tensor] = getattr(ops, work.operator)
    return lambda: operator(x_MK, w_KN, group=group)


def _model_step(work: Work, device: torch.device) -> Callable[[], object]:
    with torch.device(device):
        model, args, kwargs = call(load(work.target), work.given)
    compiled = torch.compile(model, backend="mkernel")

    def forward() -> object:
        with torch.no_grad():
            return compiled(*args, **kwargs)

    def both() -> object:
        result = compiled(*args, **kwargs)
        if not isinstance(result, Tensor):
            raise OptionError("the model must return one tensor to be traced with its backward pass")
        return result.float().sum().backward()  # type: ignore[no-untyped-call]

    return forward if work.forward_only else both
