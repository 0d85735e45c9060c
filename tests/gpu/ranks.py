"""Ranks without processes: several on one GPU, or one on each GPU of this process, with peers as tables of addresses.

Shapes: M rows, N columns, K summed; W ranks.
"""

from __future__ import annotations

import faulthandler
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from mkcompile.runtime import driver
from mkcompile.runtime.fault_word import FaultWord
from mkcompile.runtime.kernel import (
    LaunchArguments,
    LoadedKernel,
    PeerTable,
    PreparedLaunch,
    compile_kernel,
    load_kernel,
)
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.recorder import RankTrace, Recorder
from mkcompile.runtime.stream_schedule import stream_schedule
from mkcompile.runtime.tensor_map import Matrix
from mkcompile.runtime.tile_schedule import LaunchSize, TileSchedule, choose_schedule
from mkcompile.runtime.workspace_layout import WorkspaceLayout

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInput:
    """What one rank brings: x [M, K]; w [N, K] or [K, N]; bias [N] or None."""

    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass(slots=True)
class RankGroup:
    """W ranks, rank r on `devices[r]`, each with a workspace whose staging is NaN and a stream of its own."""

    devices: Sequence[int]
    arena_bytes: int = 64 << 20
    max_tiles: int = 4096
    timeout_s: float = 5.0
    layout: WorkspaceLayout = field(init=False)
    workspaces: list[torch.Tensor] = field(init=False, default_factory=list)
    faults: list[FaultWord] = field(init=False, default_factory=list)
    streams: list[torch.cuda.Stream] = field(init=False, default_factory=list)
    recorders: list[Recorder] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.layout = self.make_layout()
        for one in set(self.devices):
            for other in set(self.devices) - {one}:
                driver.enable_peer_access(one, other)
        for device in self.devices:
            workspace = torch.full((self.arena_bytes,), 0xFF, dtype=torch.uint8, device=f"cuda:{device}")
            workspace[: self.layout.region_offset] = 0
            self.workspaces.append(workspace)
            self.faults.append(FaultWord.allocate(device))
            self.streams.append(torch.cuda.Stream(device=device))
        self.synchronize()

    def make_layout(self) -> WorkspaceLayout:
        """Of every rank's workspace."""
        return WorkspaceLayout(world=self.world, total_bytes=self.arena_bytes, max_tiles=self.max_tiles)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.devices)

    @property
    def local_world(self) -> int:
        """Ranks of a node."""
        return self.world

    def max_grid(self) -> int:
        """Blocks a rank, so that all launches are resident at once."""
        sms = torch.cuda.get_device_properties(self.devices[0]).multi_processor_count
        sharing = max(self.devices.count(device) for device in self.devices)
        return (sms - 4) // sharing

    def peers(self, rank: int, outs: Sequence[torch.Tensor] = ()) -> PeerTable:
        """The peer table of one rank."""
        return PeerTable(
            rank=rank,
            workspaces=tuple(workspace.data_ptr() for workspace in self.workspaces),
            layout=self.layout,
            fault_address=self.faults[rank].address,
            timeout_s=self.timeout_s,
            outs=tuple(out.data_ptr() for out in outs),
            group=tuple(range(self.world)),
            share_device=len(set(self.devices)) < self.world,
        )

    def record(self) -> None:
        """From now on launches that are prepared are recorded, if their kernels are traced."""
        for device in self.devices:
            where = torch.device("cuda", device)
            num_sms = torch.cuda.get_device_properties(where).multi_processor_count
            self.recorders.append(Recorder(device=where, num_blocks=num_sms))
        self.synchronize()

    def traces(self) -> list[RankTrace]:
        """What was recorded, by rank."""
        self.synchronize()
        return [recorder.read(rank) for rank, recorder in enumerate(self.recorders)]

    def synchronize(self) -> None:
        """Wait for all ranks, but not for ever: what a hung kernel reported is in host memory, and worth more than
        silence. Nothing can be done with the devices then, so the process ends.
        """
        events = []
        for rank, stream in enumerate(self.streams):
            with torch.cuda.device(self.devices[rank]):
                events.append(torch.cuda.Event())
                events[-1].record(stream)
        limit_s = time.monotonic() + 4 * self.timeout_s + 10
        while not all(event.query() for event in events):
            if time.monotonic() > limit_s:
                hung = [rank for rank, event in enumerate(events) if not event.query()]
                reports = [fault.describe() for fault in self.faults]
                os.write(2, f"\nranks {hung} of {list(self.devices)} hang; reports: {reports}\n".encode())
                faulthandler.dump_traceback()
                os._exit(3)
        for device in set(self.devices):
            torch.cuda.synchronize(device)

    def check(self) -> None:
        """Raises: what any rank's kernels reported."""
        for fault in self.faults:
            fault.check()

    def prepare(
        self, config: KernelConfig, inputs: Sequence[RankInput], outs: Sequence[torch.Tensor],
        schedule: TileSchedule | None = None, segments: int = 1, scale: float = 1.0,
        kernels: Sequence[LoadedKernel] | None = None, adds: bool = False,
    ) -> list[PreparedLaunch]:  # fmt: skip
        """One launch a rank; its kernels are loaded now, so that no later load waits for a kernel that spins."""
        launches = []
        for rank, (device, given) in enumerate(zip(self.devices, inputs, strict=True)):
            chosen = schedule or self.default_schedule(config, given, segments)
            peers = self.peers(rank, outs if config.broadcast == "direct" else ())
            kernel = kernels[rank] if kernels else load_kernel(compile_kernel(config), device)
            arguments = LaunchArguments(
                terms=((Matrix.of(given.x), Matrix.of(given.w)),), out=Matrix.of(outs[rank]), schedule=chosen,
                peers=peers, segments=segments, scale=scale, trace=self.recorders[rank] if self.recorders else None,
                bias=given.bias.data_ptr() if given.bias is not None else 0, adds=adds,
            )  # fmt: skip
            launches.append(PreparedLaunch(kernel, arguments))
        return launches

    def default_schedule(self, config: KernelConfig, given: RankInput, segments: int = 1) -> TileSchedule:
        """The runtime's own choice, with a grid that leaves room for the other ranks of this GPU."""
        n = given.w.shape[0 if config.weight_layout == "nk" else 1]
        size = LaunchSize(m=given.x.shape[0], n=n, k=given.x.shape[1], world=self.world, segments=segments)
        if config.streams:
            return stream_schedule(config, size, self.max_grid())
        return choose_schedule(config, size, self.max_grid())

    def run(self, launches: Sequence[PreparedLaunch], ranks: Sequence[int] | None = None) -> None:
        """Enqueue on the given ranks (default: all), each on its stream."""
        for rank in ranks if ranks is not None else range(self.world):
            with torch.cuda.device(self.devices[rank]):
                launches[rank].run(self.streams[rank].cuda_stream)

    def delay(self, rank: int, cycles: int = 4_000_000) -> None:
        """Keep one rank's stream busy for about `cycles` clock cycles."""
        with torch.cuda.device(self.devices[rank]), torch.cuda.stream(self.streams[rank]):
            torch.cuda._sleep(cycles)


def with_grid(schedule: TileSchedule, grid: int) -> TileSchedule:
    """The same order on another grid."""
    return replace(schedule, grid=grid)


def random_input(
    rank: int, device: int, m: int, n: int, k: int, config: KernelConfig, seed: int = 0, integers: bool = False
) -> RankInput:
    """Inputs of one rank, different on every rank; integers are sparse, so that all sums are exact in the dtype."""
    generator = torch.Generator(device=f"cuda:{device}").manual_seed(1000 * seed + 17 * rank + 1)
    dtype = TORCH_DTYPES[config.dtype]

    def matrix(*shape: int) -> torch.Tensor:
        where = {"device": f"cuda:{device}", "generator": generator}
        if not integers:
            return torch.randn(*shape, **where).to(dtype)  # type: ignore[call-overload]
        share = min(1.0, 12.0 / k**0.5)
        values = torch.randint(-1, 2, shape, **where)  # type: ignore[call-overload]
        return (values * (torch.rand(*shape, **where) < share)).to(dtype)  # type: ignore[call-overload]

    return RankInput(
        x=matrix(m, k),
        w=matrix(n, k) if config.weight_layout == "nk" else matrix(k, n),
        bias=matrix(n) if config.has_bias else None,
    )


def nan_outputs(group: RankGroup, rows: int, n: int, config: KernelConfig) -> list[torch.Tensor]:
    """Results full of NaN, one a rank."""
    dtype = TORCH_DTYPES[config.dtype]
    return [torch.full((rows, n), float("nan"), dtype=dtype, device=f"cuda:{device}") for device in group.devices]
