"""What the launcher asks of the machine, in one place, so that all of its decisions can be tested without a GPU."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

import torch

from mkcompile.runtime import driver, probe
from mkcompile.runtime.chain import StreamOperations
from mkcompile.runtime.exchange import Exchange
from mkcompile.runtime.faults import HostMemory
from mkcompile.runtime.gather_engine import EngineDevice
from mkcompile.runtime.host import Host
from mkcompile.runtime.kernel import LoadedKernel, compile_kernel, load_kernel
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.network_gather import MoverDevice
from mkcompile.runtime.network_link import CudaLinks, GroupNetwork
from mkcompile.runtime.node import EMULATED
from mkcompile.runtime.node_memory import NodeBacking
from mkcompile.runtime.probe import Survey
from mkcompile.runtime.streams import DriverStreams
from mkcompile.runtime.symmetric import Backing, TorchBacking

_FAULT_BOARD_BYTES = 256 * 64


class Platform(Protocol):
    """Devices of one type."""

    device_type: str

    def num_sms(self, device: torch.device) -> int: ...
    def streams(self, device: torch.device) -> StreamOperations: ...
    def host(self, device: torch.device) -> Host: ...
    def is_capturing(self) -> bool: ...
    def survey(self, exchange: Exchange, device: torch.device) -> Survey:
        """Collective: whether the ranks can launch together, and how they lie."""
        ...

    def backing(self, device: torch.device, group: str) -> Backing: ...
    def network(self, exchange: Exchange, device: torch.device, survey: Survey) -> tuple[GroupNetwork, Backing]:
        """How the workspaces of a group that spans nodes are joined, and where their memory comes from."""
        ...

    def fault_memory(self, device: torch.device) -> HostMemory: ...
    def compile(self, configs: Sequence[KernelConfig]) -> None:
        """Machine code for all of them, side by side: `load` finds it."""
        ...

    def load(self, config: KernelConfig, device: torch.device) -> LoadedKernel: ...
    def engine(self, device: torch.device, streams: StreamOperations) -> EngineDevice: ...
    def mover(self, device: torch.device, streams: StreamOperations) -> MoverDevice: ...


class CudaPlatform:
    """CUDA devices.

    Torch's handshakes are numbered by the process; each platform has a lock for them, so one is used at a time: the
    launcher's, or that of measurements.
    """

    device_type = "cuda"

    def __init__(self) -> None:
        self._handshakes = threading.Lock()

    def num_sms(self, device: torch.device) -> int:
        """SMs of the device."""
        return torch.cuda.get_device_properties(device).multi_processor_count

    def streams(self, device: torch.device) -> StreamOperations:
        """Events and captures of the device."""
        return DriverStreams()

    def host(self, device: torch.device) -> Host:
        """Torch's own; the allocation is the one that Inductor's code calls, without the dispatcher."""
        assert device.index is not None
        return Host(
            device_idx=device.index,
            current_device=torch._C._cuda_getDevice,
            current_stream=partial(torch._C._cuda_getCurrentRawStream, device.index),
            empty=torch._C._dynamo.guards._empty_strided_cuda,  # type: ignore[attr-defined]
        )

    def is_capturing(self) -> bool:
        """Is the current stream part of a capture?"""
        return torch.cuda.is_current_stream_capturing()

    def survey(self, exchange: Exchange, device: torch.device) -> Survey:
        """Collective. Raises: PeerTimeoutError."""
        return probe.compare_facts(exchange, device)

    def backing(self, device: torch.device, group: str) -> Backing:
        """Torch's symmetric memory."""
        return TorchBacking(device, group, self._handshakes)

    def network(self, exchange: Exchange, device: torch.device, survey: Survey) -> tuple[GroupNetwork, Backing]:
        """Proxies, and memory of our own, which NICs can register."""
        assert device.index is not None
        placement, links = survey.placement, survey.network
        opener = CudaLinks(device_idx=device.index, transport=links, placement=placement)
        network = GroupNetwork(placement=placement, open=opener)
        reached = tuple(range(exchange.world_size)) if links == EMULATED else network.members(exchange.rank)
        return network, NodeBacking(device=device, exchange=exchange, reached=reached)

    def fault_memory(self, device: torch.device) -> HostMemory:
        """Raises: DriverError."""
        assert device.index is not None
        address = driver.allocate_mapped(_FAULT_BOARD_BYTES, device.index)
        return HostMemory(address=address, size_bytes=_FAULT_BOARD_BYTES)

    def compile(self, configs: Sequence[KernelConfig]) -> None:
        """Raises: CompileError."""
        with ThreadPoolExecutor(max_workers=len(configs)) as threads:  # the compiler runs without Python's lock
            list(threads.map(compile_kernel, configs))

    def load(self, config: KernelConfig, device: torch.device) -> LoadedKernel:
        """From memory, disk or the compiler, then onto the device. Raises: CompileError, DriverError."""
        assert device.index is not None
        return load_kernel(compile_kernel(config), device.index)

    def engine(self, device: torch.device, streams: StreamOperations) -> EngineDevice:
        """What the copy engine's transfers need. Raises: CompileError, DriverError."""
        assert device.index is not None
        return EngineDevice.on(device.index, streams)

    def mover(self, device: torch.device, streams: StreamOperations) -> MoverDevice:
        """What moves shards over nodes. Raises: CompileError, DriverError."""
        assert device.index is not None
        return MoverDevice.on(device.index, streams)
