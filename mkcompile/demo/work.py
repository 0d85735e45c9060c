"""What each rank of the demo does: run both models eagerly, under Inductor and under mkernel; compare; explain."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from mkcompile.demo.models import (
    Size,
    Workload,
    plain_training,
    sequence_parallel_training,
    tensor_parallel_inference,
)
from mkcompile.inspect.explain import Request, explain_request
from mkcompile.inspect.ranks import Say
from mkcompile.inspect.report import Report
from mkcompile.ops.registry import Call, set_launcher
from mkcompile.runtime.wiring import install

MAKERS = {"inference": tensor_parallel_inference, "training": sequence_parallel_training, "plain": plain_training}
HUGGING_FACE = ("inference", "training")
STEPS = ("eager", "inductor", "mkernel", "explain")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What all ranks are asked for; `models` are keys of MAKERS.

    `plant_error`: make every fused operator wrong, to see that the demo notices.
    """

    models: tuple[str, ...]
    size: Size
    world_size: int
    device: str
    dtype: torch.dtype
    fuse: str
    plant_error: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Largest difference of one tensor under mkernel, over the largest magnitude of what it is compared with."""

    tensor: str
    from_eager: float
    from_inductor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One model on one rank; `report` is rank 0's. Units: `seconds` of the first call by backend, with compilation."""

    name: str
    differences: tuple[Difference, ...]
    seconds: dict[str, float]
    report: Report | None


def work(rank: int, say: Say, *, job: Job) -> list[Outcome]:
    """The models on this rank, one after the other."""
    mesh = init_device_mesh(job.device, (job.world_size,))
    return [_compare(rank, say, MAKERS[model](job.size, mesh, job.dtype), job) for model in job.models]


def _compare(rank: int, say: Say, workload: Workload, job: Job) -> Outcome:
    options: dict[str, Any] = {"mkernel.fuse": job.fuse}
    calls: dict[str, Callable[[], Callable[..., Any]]] = {
        "eager": lambda: workload.module,
        "inductor": lambda: torch.compile(workload.module, backend="inductor", fullgraph=True),
        "mkernel": lambda: torch.compile(workload.module, backend="mkernel", fullgraph=True, options=options),
    }
    results: dict[str, dict[str, Tensor]] = {}
    seconds: dict[str, float] = {}
    for backend, call in calls.items():
        say(f"{workload.name}: {backend}")
        torch._dynamo.reset()
        started = time.perf_counter()
        with _planted_error(job.plant_error and backend == "mkernel"):
            results[backend] = _measure(workload, call())
        seconds[backend] = time.perf_counter() - started
    say(f"{workload.name}: explain")
    differences = tuple(
        Difference(
            tensor=name,
            from_eager=_relative(result, results["eager"][name]),
            from_inductor=_relative(result, results["inductor"][name]),
        )
        for name, result in results["mkernel"].items()
    )
    report = _explain(workload, options) if rank == 0 else None
    return Outcome(name=workload.name, differences=differences, seconds=seconds, report=report)


def _measure(workload: Workload, call: Callable[..., Any]) -> dict[str, Tensor]:
    """The output and, where it trains, every gradient; of sharded parameters the whole gradient."""
    with torch.set_grad_enabled(workload.trains):
        output = workload.output(call)
    if not workload.trains:
        return {"output": output}
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(output.shape, generator=generator).to(output.device, output.dtype)
    named = {**dict(workload.module.named_parameters()), **workload.inputs}
    gradients = torch.autograd.grad((output * weights).sum(), list(named.values()))
    return {"output": output.detach(), **{f"d {name}": _whole(g) for name, g in zip(named, gradients, strict=True)}}


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _relative(ours: Tensor, theirs: Tensor) -> float:
    return ((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max()).item()


def _explain(workload: Workload, options: dict[str, Any]) -> Report:
    with torch.set_grad_enabled(workload.trains):
        return explain_request(
            Request(model=workload.module, args=workload.args, kwargs=workload.kwargs, options=options)
        )


@contextmanager
def _planted_error(planted: bool) -> Iterator[None]:
    """While it holds, and is asked for, the first number of every fused operator's result is wrong."""
    if not planted:
        yield
        return

    def wrong(call: Call) -> Any:
        result = call.reference()
        first = result if isinstance(result, Tensor) else result[0]
        first.view(-1)[0] += 1
        return result

    set_launcher(wrong)
    try:
        yield
    finally:
        install()
