"""All-gather calls of ranks on several nodes in one process; see `gather_calls.py` and `network_ranks.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mkcompile.runtime.gather_abi import ENGINE_COPIES
from mkcompile.runtime.gather_launch import GatherLaunch, GatherSchedule, GatherSize
from mkcompile.runtime.gather_operation import GatherTensors
from mkcompile.runtime.identity import LaunchIdentity
from mkcompile.runtime.kernel import LoadedKernel, compile_kernel, load_kernel
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.network_gather import (
    MoverDevice,
    MoverGrid,
    PreparedNetworkGather,
    network_group_rows,
)
from mkcompile.runtime.streams import DriverStreams
from mkcompile.runtime.tensor_map import Matrix

from .gather_calls import Call, draw
from .network_ranks import NodeGroup

#: SMs of a GPU that movers of all its ranks may use.
_MOVER_SMS = 24


@dataclass(frozen=True, slots=True)
class OverNetwork:
    """One rank's work."""

    kernel: PreparedNetworkGather

    @property
    def identity(self) -> LaunchIdentity:
        return self.kernel.identity

    def run(self, tensors: GatherTensors | None, stream: int, captured: bool) -> None:
        self.kernel.run(stream, captured)


@dataclass(frozen=True, slots=True, kw_only=True)
class Movers:
    """The movers' side of a group: one for each rank, with a stream of its own; and how the ranks share the SMs."""

    devices: tuple[MoverDevice, ...]
    grid: int
    threads: int

    @staticmethod
    def of(group: NodeGroup) -> Movers:
        sharing = max(group.devices.count(device) for device in group.devices)
        num_sms = torch.cuda.get_device_properties(group.devices[0]).multi_processor_count
        made = []
        for device in group.devices:
            with torch.cuda.device(device):
                made.append(MoverDevice.on(device, DriverStreams()))
        grid = num_sms - 4 if sharing == 1 else (num_sms - _MOVER_SMS) // sharing
        return Movers(devices=tuple(made), grid=grid, threads=512 if sharing == 1 else 256)

    def mover(self, group: NodeGroup, returned: bool) -> MoverGrid:
        """As few blocks as do all there is to do, where ranks share a GPU."""
        alone = self.threads == 512
        relays = (4 if alone else 1) if group.local_world > 1 or returned else 0
        return MoverGrid(own=3 if alone else 1, relays=relays, threads=self.threads)


def config_of(group: NodeGroup, tile: tuple[int, int] = (128, 256), **others: object) -> KernelConfig:
    """A configuration for the group's shape."""
    return KernelConfig(
        operator="all_gather_gemm", network=group.network, block_m=tile[0], block_n=tile[1], **others  # type: ignore[arg-type]
    )  # fmt: skip


def make_call(
    group: NodeGroup, movers: Movers, config: KernelConfig, size: GatherSize, *, seed: int = 0, integers: bool = False,
    returned: bool = False, kernels: Sequence[LoadedKernel] | None = None, group_rows: int = 0,
) -> Call:  # fmt: skip
    """Different numbers on every rank and for every seed."""
    tensors = [draw(group, rank, config, size, 10 * seed, integers, returned) for rank in range(group.world)]
    mover = movers.mover(group, returned)
    grid = movers.grid - (mover.relays if movers.threads == 512 else 0)
    schedule = GatherSchedule(
        grid=grid, mover=ENGINE_COPIES, group_rows=group_rows or network_group_rows(size, config), raster_group=4
    )
    prepared = []
    for rank, one in enumerate(tensors):
        launch = GatherLaunch(
            shard=Matrix.of(one.shard), weights=tuple(Matrix.of(w) for w in one.weights),
            outs=tuple(Matrix.of(out) for out in one.outs), size=size, schedule=schedule, peers=group.peers(rank),
            biases=tuple(0 if bias is None else bias.data_ptr() for bias in one.bias),
            result=0 if one.gathered is None else one.gathered.data_ptr(),
            trace=group.recorders[rank] if group.recorders else None,
        )  # fmt: skip
        kernel = kernels[rank] if kernels else load_kernel(compile_kernel(config), group.devices[rank])
        prepared.append(OverNetwork(PreparedNetworkGather(kernel, movers.devices[rank], launch, mover)))
    return Call(size=size, config=config, tensors=tensors, prepared=list(prepared))
