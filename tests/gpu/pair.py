"""Two processes, one GPU each: how a case starts, what it counts, and the numbers that it compares with.

Shapes: M rows, N columns, K summed on each rank; W ranks.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._inductor.compile_fx import compile_fx

from benchmarks import by_turns
from mkcompile.backend import inductor_patches, with_pass
from mkcompile.config import Options
from mkcompile.errors import PeerTimeoutError
from mkcompile.ops.problem import Problem
from mkcompile.ops.registry import Call, Shortcut, set_launcher
from mkcompile.passes.fusion_pass import FusionPass
from mkcompile.passes.reason import Reason
from mkcompile.plan.topology import preset
from mkcompile.runtime.agree import Agreement
from mkcompile.runtime.dispatch import Dispatch
from mkcompile.runtime.exchange import Exchange
from mkcompile.runtime.launcher import Launcher
from mkcompile.runtime.network_choice import TCP_GBPS, transport_of_kernels
from mkcompile.runtime.operation import Operation
from mkcompile.runtime.platform import CudaPlatform
from mkcompile.runtime.workspace import Workspace
from tests.gpu.truth import assert_close

#: Reductions with a kernel.
KERNELS = ("gemm_all_reduce", "gemm_reduce_scatter")
_FUSED = (*KERNELS, "all_gather_gemm")


class CountingLauncher(Launcher):
    """The launcher, with how many calls of each operator it was offered and how many became a launch."""

    def __init__(self, platform: CudaPlatform | None = None) -> None:
        super().__init__(platform)
        self.offered: Counter[str] = Counter()
        self.launched: Counter[str] = Counter()

    def __call__(self, call: Call) -> Tensor | None:
        self.offered[call.NAME] += 1
        result = super().__call__(call)
        if result is not None:
            self.launched[call.NAME] += 1
        return result

    def shortcut(self, call_type: type[Call]) -> Shortcut | None:
        """Counts too."""
        short = super().shortcut(call_type)
        if short is None:
            return None

        def counting(*arguments: Any) -> Any:
            result = short(*arguments)
            if result is not None:
                self.offered[call_type.NAME] += 1
                self.launched[call_type.NAME] += 1
            return result

        return counting

    def workspace(self, group: str, device: torch.device) -> Workspace:
        """The workspace in use."""
        current = self._resources.groups[group, device].workspace.current
        assert current is not None
        return current

    def operation(self, operator: str) -> Operation:
        """The newest of an operator."""
        return self.operations(operator)[-1]

    def operations(self, operator: str) -> list[Operation]:
        """All of an operator."""
        known = [one for one in self._operations.values() if isinstance(one, Operation)]
        return [one for one in known if one.kernel.config.operator == operator]


@dataclass(slots=True)
class Pair:
    """One of two ranks."""

    rank: int
    world_size: int
    device: torch.device
    launcher: CountingLauncher
    shares_device: bool = False
    collectives: torch.library.Library | None = None
    num_cases: int = 0

    @property
    def group(self) -> str:
        """The name of the group of both ranks."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD.group_name

    @property
    def platform(self) -> CudaPlatform | None:
        """For launchers of a case's own; None for the launcher's own choice."""
        return by_turns.SharedPlatform() if self.shares_device else None

    @property
    def on_gpu(self) -> bool:
        """False where the script itself is tried without GPUs."""
        return self.device.type == "cuda"

    def forget_counts(self) -> None:
        """Count offers and launches from here."""
        self.launcher.offered.clear()
        self.launcher.launched.clear()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def meet(self) -> None:
        """Both hosts are here, and both devices are idle; not by the operators under test."""
        self.synchronize()
        dist.barrier()
        self.synchronize()

    def expect_launches(self, operator: str, at_least: int = 1) -> None:
        """The kernels ran, not the reference; without GPUs the calls came at least. Results that were added to a
        residual count, too.
        """
        counted = self.launcher.launched if self.on_gpu else self.launcher.offered
        assert counted[operator] + counted[f"{operator}_add"] >= at_least, dict(counted)

    def draw(self, *shape: int, seed: int, rank: int | None = None, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Normal numbers of one rank (default: this one), different for every rank and seed."""
        owner = self.rank if rank is None else rank
        generator = torch.Generator(device=self.device).manual_seed(7919 * seed + 31 * owner + 1)
        return torch.randn(*shape, device=self.device, generator=generator).to(dtype)

    def integers(self, *shape: int, seed: int, rank: int | None = None, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """-1, 0 and 1, few enough that every sum is exact."""
        owner = self.rank if rank is None else rank
        generator = torch.Generator(device=self.device).manual_seed(104729 * seed + 31 * owner + 1)
        values = torch.randint(-1, 2, shape, device=self.device, generator=generator)
        kept = torch.rand(*shape, device=self.device, generator=generator) < min(1.0, 12.0 / shape[-1] ** 0.5)
        return (values * kept).to(dtype)

    def same_on_all_ranks(self, tensor: Tensor, what: str) -> None:
        """Bitwise, by a gather of the bytes."""
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(gathered, tensor.contiguous())
        for rank, other in enumerate(gathered):
            assert torch.equal(other.view(torch.uint8), tensor.contiguous().view(torch.uint8)), f"{what}: rank {rank}"

    def poison(self) -> None:
        """Fill the staging of the workspace with NaN on all ranks."""
        if not self.on_gpu:
            return
        self.meet()
        workspace = self.launcher.workspace(self.group, self.device)
        workspace.buffer.keep[1][workspace.layout.region_offset :].fill_(0xFF)
        self.meet()


def start(rank: int, world_size: int, rendezvous: Path, device_type: str, timeout_s: float) -> Pair:
    """Join the group, NCCL on GPUs of their own and gloo else, and install a launcher that counts.

    `device_type`: "cuda", "cpu", or "shared", where all ranks have the first GPU.
    """
    device = torch.device("cpu") if device_type == "cpu" else torch.device("cuda", rank * (device_type == "cuda"))
    keywords: dict[str, Any] = {"device_id": device} if device_type == "cuda" else {}
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        # named for each device, or a mesh would make a group of its own beside it
        {"cuda": "nccl", "shared": "cpu:gloo,cuda:gloo"}.get(device_type, "gloo"),
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        **keywords,
    )
    torch.manual_seed(1000 + rank)
    shares, collectives = device_type == "shared", None
    if shares:
        transport = transport_of_kernels()
        by_turns.plan_as(
            replace(preset("2xh200"), transport=transport, nic_gbps=TCP_GBPS if transport == "tcp" else 0.0)
        )
        # memory of an expandable segment is mapped by no other process, and no case there has such a collective
        expandable = "expandable_segments" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        collectives = None if expandable else by_turns.install(device)
    launcher = CountingLauncher(by_turns.SharedPlatform() if shares else None)
    set_launcher(Dispatch(Agreement(), launcher))
    return Pair(
        rank=rank, world_size=world_size, device=device, launcher=launcher, shares_device=shares,
        collectives=collectives,
    )  # fmt: skip


def both_are_done(pair: Pair) -> bool:
    """Have both ranks ended the case, well or not? Else they are apart, and later cases would only say so."""
    assert dist.group.WORLD is not None
    try:
        Exchange(dist.group.WORLD, f"case {pair.num_cases}", timeout_s=15.0).gather("done", "")
    except PeerTimeoutError:
        return False
    pair.num_cases += 1
    return True


def kernels_only(problem: Problem) -> float | Reason:
    """The judge that fuses what has a kernel."""
    return float(problem.flops) if problem.operator in _FUSED else Reason.POLICY_NEVER


def backend_of_kernels(gm: fx.GraphModule, inputs: Sequence[Any], **keywords: Any) -> Callable[..., Any]:
    """The backend with that judge, as `torch.compile(backend=...)` takes it."""
    patches = inductor_patches(keywords.get("options") or {}, keywords.get("mode"))
    fusion = FusionPass(Options(), kernels_only, facts="kernels only")
    compiled: Callable[..., Any] = compile_fx(gm, inputs, config_patches=with_pass(patches, fusion))  # type: ignore[assignment]
    return compiled


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One operator call on all ranks: its inputs, so that each rank can work out the whole sum.

    `rows`: of the result on one rank. `layout`: how the weight lies in memory. `sliced`: operands are views of larger
    tensors.
    """

    operator: str
    rows: int
    n: int
    k: int
    layout: str = "nk"
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    average: bool = False
    outer: int = 1
    sliced: bool = False
    integers: bool = False
    seed: int = 0

    @property
    def name(self) -> str:
        flags = [name for name in ("bias", "average", "sliced", "integers") if getattr(self, name)]
        kind = str(self.dtype).removeprefix("torch.")
        outer = [f"outer{self.outer}"] if self.outer > 1 else []
        return "-".join([self.operator, f"{self.rows}x{self.n}x{self.k}", self.layout, kind, *outer, *flags])

    def m(self, world_size: int) -> int:
        """Rows of the GEMM."""
        return self.rows * (world_size if self.operator == "gemm_reduce_scatter" else 1)

    def inputs(self, pair: Pair, rank: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """x [M, K], w [K, N], bias of one rank."""
        draw = pair.integers if self.integers else pair.draw
        m, margin = self.m(pair.world_size), 16 if self.sliced else 0
        x = draw(m, self.k + margin, seed=3 * self.seed, rank=rank, dtype=self.dtype)[:, margin:]
        stored = (self.n, self.k) if self.layout == "nk" else (self.k, self.n)
        whole = draw(stored[0] + margin, stored[1] + margin, seed=3 * self.seed + 1, rank=rank, dtype=self.dtype)
        weight = whole[margin:, margin:]
        bias = draw(self.n, seed=3 * self.seed + 2, rank=rank, dtype=self.dtype) if self.bias else None
        return x, weight.t() if self.layout == "nk" else weight, bias

    def call(self, pair: Pair, x: Tensor, w: Tensor, bias: Tensor | None, group: str | None = None) -> Tensor:
        """The operator."""
        reduce_op, name = "avg" if self.average else "sum", group or pair.group
        if self.operator == "gemm_all_reduce":
            result = torch.ops.mkcompile.gemm_all_reduce([x], [w], bias, reduce_op, pair.world_size, name, "")
        else:
            shape = [self.outer, self.m(pair.world_size) // self.outer, self.n]
            result = torch.ops.mkcompile.gemm_reduce_scatter(
                [x], [w], bias, shape, 1, reduce_op, pair.world_size, name, ""
            )
        return result.reshape(-1, self.n)

    def expected(self, pair: Pair) -> tuple[Tensor, Tensor]:
        """This rank's part of the truth in fp32, and of what an unfused run in the same dtype rounds to."""
        truth = torch.zeros(self.m(pair.world_size), self.n, device=pair.device)
        baseline = torch.zeros_like(truth)
        for rank in range(pair.world_size):
            x, w, bias = self.inputs(pair, rank)
            truth += x.float() @ w.float() + (0.0 if bias is None else bias.float())
            baseline += (x @ w if bias is None else torch.addmm(bias, x, w)).float()
        scale = 1.0 / pair.world_size if self.average else 1.0
        return self._own(pair, truth * scale), self._own(pair, (baseline * scale).to(self.dtype))

    def _own(self, pair: Pair, whole: Tensor) -> Tensor:
        if self.operator == "gemm_all_reduce":
            return whole
        parts = whole.view(self.outer, pair.world_size, -1, self.n)
        return parts[:, pair.rank].reshape(self.rows, self.n)

    def check(self, pair: Pair, out: Tensor, expected: tuple[Tensor, Tensor] | None = None) -> float:
        """Close per tile, exact for integers, the same bits on all ranks. Returns error over baseline's error."""
        truth, baseline = expected or self.expected(pair)
        if self.operator == "gemm_all_reduce":
            pair.same_on_all_ranks(out, self.name)
        if self.integers:
            assert torch.equal(out.float(), truth), f"{self.name}: {int((out.float() != truth).sum())} elements differ"
            return 0.0
        return assert_close(out, truth, baseline, self.name)


def seconds_since(started: float) -> float:
    """Rounded for a report."""
    return round(time.monotonic() - started, 2)


def environment() -> dict[str, Any]:
    """What a result was measured with."""
    facts: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        facts |= {"device": torch.cuda.get_device_name(0), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        facts["alloc_conf"] = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return facts
