"""Times plans on GPUs: what `tune` measures with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import torch
import torch.distributed as dist

from mkcompile.errors import MkcompileError, UnsupportedDeviceError
from mkcompile.ops.all_gather_gemm import AllGatherGemm
from mkcompile.ops.problem import Problem
from mkcompile.ops.registry import Call
from mkcompile.plan import key
from mkcompile.plan.exchange import Ranks
from mkcompile.plan.plan import Plan
from mkcompile.plan.reference import Maker
from mkcompile.plan.tune_command import Bench
from mkcompile.runtime.form import Form, form_of
from mkcompile.runtime.gather_form import GatherForm, gather_form_of
from mkcompile.runtime.kernel import compile_kernel
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.launcher import Launcher
from mkcompile.runtime.machine import own_basis, policy_of
from mkcompile.runtime.platform import Platform
from mkcompile.runtime.tactics import Given, from_plan, gather_from_plan

# Host time of enqueueing one call of a reference, and more: the device is kept busy with nothing until all are there.
_BACKLOG_CYCLES = 600_000
_SAMPLE_US = 2500.0
_FEWEST_CALLS, _MOST_CALLS = 3, 20
# More than the caches hold: operands come from memory, as in a model, and not from the last call.
_OPERANDS_BYTES = 320 << 20
# Rough rates, for the number of calls alone, which has to be the same on every rank.
_FLOP_PER_US, _SENT_BYTES_PER_US, _READ_BYTES_PER_US = 700e6, 300e3, 4e6


def num_calls(problem: Problem) -> int:
    """Calls of one sample: few of long ones."""
    read_bytes = problem.dtype_bytes * problem.k * problem.n
    expected_us = max(
        problem.flops / _FLOP_PER_US, problem.sent_bytes / _SENT_BYTES_PER_US, read_bytes / _READ_BYTES_PER_US, 10.0
    )
    return max(_FEWEST_CALLS, min(_MOST_CALLS, int(_SAMPLE_US / expected_us)))


@dataclass(slots=True)
class KernelMeasurer:
    """Launches plans as the launcher does, and the unfused sequence as the operators' references.

    `sample` runs calls and says what one takes; `platform` is that of the launcher.
    """

    maker: Maker
    max_grid: int
    sample: Callable[[Sequence[Callable[[], Any]], int], float]
    platform: Platform | None = None
    _plans: dict[str, Plan] = field(default_factory=dict)
    _operands: tuple[Problem, tuple[Call, ...]] | None = None
    _launcher: Launcher | None = None

    def ahead(self, work: Sequence[tuple[Problem, Plan]]) -> None:
        """Compile the kernels, on all processors at once: NVRTC lets go of the interpreter. `prepare` finds them on
        disk, and says of those that failed why.
        """
        configs = list(dict.fromkeys(self._kernels(work)))
        share = configs[dist.get_rank() :: dist.get_world_size()]
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // dist.get_world_size())) as pool:
            list(pool.map(_compile, share))

    def _kernels(self, work: Sequence[tuple[Problem, Plan]]) -> Iterator[KernelConfig]:
        """Of all plans that have one."""
        shapes = replace(self.maker, device="meta")
        for problem, plan in work:
            if not plan.fused:
                continue
            with suppress(MkcompileError):
                config = self._kernel(shapes.call(problem), plan)
                if config is not None:
                    yield config

    def prepare(self, problem: Problem, plan: Plan) -> Callable[[], float]:
        """Raises: UnsupportedDeviceError where no kernel takes the plan; CompileError; OperatorInputError."""
        calls = self._calls(problem)
        if not plan.fused:
            return lambda: self._run([call.reference for call in calls], problem)
        config = self._kernel(calls[0], plan)
        if config is not None:
            compile_kernel(config)
        # as in most compiled graphs, which leave few SMs (see `runtime.reserve`)
        name = key.with_facts(f"{key.BY_HAND};{plan.digest()}", [key.ALONE])
        self._plans[name] = plan
        named = [replace(call, plan_key=name) for call in calls]  # type: ignore[type-var]
        return lambda: self._run([_Launch(self._launcher_of_plans(), call) for call in named], problem)

    def _kernel(self, call: Call, plan: Plan) -> KernelConfig | None:
        """What has to be compiled for the plan, if anything. Raises: UnsupportedDeviceError."""
        form = gather_form_of(call) if isinstance(call, AllGatherGemm) else form_of(call)
        if isinstance(form, GatherForm):
            choice = gather_from_plan(form, plan, self.max_grid)
            if choice is not None:
                return None if choice.variant == "library" else choice.config
        elif isinstance(form, Form):
            tactic = from_plan(form, plan, self.max_grid)
            if tactic is not None:
                return tactic[0]
        why = form if isinstance(form, str) else "it is not among the launcher's kernels"
        raise UnsupportedDeviceError(f"no kernel for {plan.name}: {why}")

    def _calls(self, problem: Problem) -> tuple[Call, ...]:
        """Calls of different operands; those of one problem at a time."""
        if self._operands is None or self._operands[0] != problem:
            self._operands = None
            width = problem.hidden * (3 if problem.gated else 2) if problem.hidden else problem.n
            operand_bytes = problem.dtype_bytes * problem.k * width
            count = max(1, min(num_calls(problem), ceil(_OPERANDS_BYTES / max(operand_bytes, 1))))
            makers = [replace(self.maker, seed=self.maker.seed + 1000 * i) for i in range(count)]
            self._operands = (problem, tuple(maker.call(problem) for maker in makers))
            self._operands[1][0].check()
        return self._operands[1]

    def _run(self, calls: Sequence[Callable[[], Any]], problem: Problem) -> float:
        """One sample on this rank. Units: seconds a call."""
        seconds = self.sample(calls, num_calls(problem))
        if self._launcher is not None:
            self._launcher.check()
        return seconds

    def _launcher_of_plans(self) -> Launcher:
        if self._launcher is None:
            self._launcher = Launcher(self.platform, Given(self._plans))
        return self._launcher


def sample_on_gpu(calls: Sequence[Callable[[], Any]], count: int) -> float:
    """Mean of consecutive calls on the current device, after one that is not timed; all ranks begin together.

    Units: seconds.
    """
    dist.all_reduce(torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(_BACKLOG_CYCLES * (count + 1))  # type: ignore[no-untyped-call]
    calls[-1]()
    start.record()
    for i in range(count):
        calls[i % len(calls)]()
    end.record()
    torch.cuda.synchronize()
    elapsed_ms: float = start.elapsed_time(end)
    return elapsed_ms / count * 1e-3


def _compile(config: KernelConfig) -> None:
    with suppress(MkcompileError):
        compile_kernel(config)


@dataclass(frozen=True, slots=True)
class _Launch:
    """A call that must become a launch."""

    launcher: Launcher
    call: Call

    def __call__(self) -> Any:
        result = self.launcher(self.call)
        if result is None:
            raise UnsupportedDeviceError(f"{self.call.NAME} was not launched; see the log")
        return result


def gpu_bench() -> Bench:
    """Kernels over the default group, one GPU a rank."""
    group = dist.group.WORLD
    assert group is not None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    topology, policy = own_basis().topology, policy_of()
    max_grid = topology.gpu.num_sms - policy.reserve_sms
    return Bench(
        topology=topology,
        measurer=KernelMeasurer(
            maker=Maker(group=group.group_name, device=str(device), seed=rank), max_grid=max_grid, sample=sample_on_gpu
        ),
        ranks=Ranks(
            rank=rank,
            world_size=world_size,
            store=dist.distributed_c10d._get_default_store(),
            name="mkcompile/tune",
        ),
        policy=replace(policy, fuse="always"),
    )
