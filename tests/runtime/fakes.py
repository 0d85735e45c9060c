"""A machine without GPUs for the launcher: memory of the host, a driver that records, tensors on the CPU."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"

from mkcompile.config import settings
from mkcompile.errors import MkcompileError, TransportError, UnsupportedDeviceError, WorkspaceError
from mkcompile.plan.placement import Placement
from mkcompile.runtime import abi
from mkcompile.runtime.exchange import Exchange
from mkcompile.runtime.faults import HostMemory
from mkcompile.runtime.gather_engine import EngineDevice
from mkcompile.runtime.host import Host
from mkcompile.runtime.kernel import LoadedKernel
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.network_gather import MoverDevice
from mkcompile.runtime.network_layout import NetworkShape, NetworkTable
from mkcompile.runtime.network_link import GroupNetwork, NetworkLink
from mkcompile.runtime.probe import Survey
from mkcompile.runtime.proxy.abi import COUNTERS
from mkcompile.runtime.side_stream import SideStreams
from mkcompile.runtime.symmetric import SymmetricBuffer
from mkcompile.runtime.workspace_layout import WorkspaceLayout


@dataclass
class FakeStreams:
    """Streams whose operations are a list of texts; `capturing` is the capture that all streams are part of which
    `captures` does not name.
    """

    capturing: int = 0
    captures: dict[int, int] = field(default_factory=dict)
    events: int = 0
    log: list[str] = field(default_factory=list)

    def create_event(self) -> int:
        self.events += 1
        return self.events

    def record_event(self, event: int, stream: int) -> None:
        self.log.append(f"record {event} on {stream}")

    def wait_event(self, stream: int, event: int) -> None:
        self.log.append(f"{stream} waits {event}")

    def capture_id(self, stream: int) -> int:
        return self.captures.get(stream, self.capturing)


@dataclass(eq=False)
class FakeBlock:
    """Memory that nobody looks at."""

    size_bytes: int


@dataclass
class FakeBacking:
    """Host memory that only this process has; `addresses` of peers are made up. `held`: what somebody still owns."""

    world_size: int
    allocation_failure: str = ""
    connection_failure: str = ""
    null_peer: int = -1
    allocated_bytes: list[int] = field(default_factory=list)
    settled: int = 0
    handshakes: threading.Lock | None = field(default_factory=threading.Lock)
    log: list[str] = field(default_factory=list)
    held: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)

    def allocate(self, size_bytes: int, zeroed_bytes: int) -> torch.Tensor | FakeBlock:
        """Memory for results, of which nothing is zeroed, is real: tensors are made there."""
        if self.allocation_failure:
            raise WorkspaceError(self.allocation_failure)
        self.allocated_bytes.append(size_bytes)
        memory = FakeBlock(size_bytes) if zeroed_bytes else torch.empty(size_bytes, dtype=torch.uint8)
        self.held.add(memory)
        return memory

    def connect(self, memory: torch.Tensor | FakeBlock) -> SymmetricBuffer:
        if self.connection_failure:
            raise UnsupportedDeviceError(self.connection_failure)
        addresses = [(rank + 1) << 40 for rank in range(self.world_size)]
        if self.null_peer >= 0:
            addresses[self.null_peer] = 0
        if isinstance(memory, torch.Tensor):
            addresses[0] = memory.data_ptr()
        size_bytes = memory.size_bytes if isinstance(memory, FakeBlock) else memory.numel()
        weakref.finalize(memory, self.log.append, f"free {size_bytes}")
        return SymmetricBuffer(
            addresses=tuple(addresses), size_bytes=size_bytes, keep=(memory,), unmap=lambda: self.log.append("unmap")
        )

    def settle(self) -> None:
        self.settled += 1
        self.log.append("settle")


@dataclass
class FakeDriver:
    """Takes launches and tensor maps; keeps the argument block of each launch."""

    launches: list[abi.KernelArguments] = field(default_factory=list)
    grids: list[int] = field(default_factory=list)
    moved_maps: int = 0
    copies: list[tuple[int, int, int]] = field(default_factory=list)

    def cuTensorMapEncodeTiled(self, target: Any, *rest: Any) -> int:  # noqa: N802 (the driver's name)
        # the address is in the map, so that a test can see whose map it is
        pointer = rest[2].value or 0
        ctypes.memmove(target.value, ctypes.byref(ctypes.c_uint64(pointer)), 8)
        return 0

    def cuTensorMapReplaceAddress(self, target: Any, pointer: Any) -> int:  # noqa: N802
        assert target.value % 64 == 0
        self.moved_maps += 1
        ctypes.memmove(target.value, ctypes.byref(ctypes.c_uint64(pointer.value)), 8)
        return 0

    def cuMemcpyAsync(self, target: Any, source: Any, num_bytes: Any, stream: Any) -> int:  # noqa: N802
        self.copies.append((target.value, source.value, num_bytes.value))
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: Any) -> int:  # noqa: N802
        block = abi.KernelArguments.from_buffer_copy(
            ctypes.string_at(parameters[0], ctypes.sizeof(abi.KernelArguments))
        )
        self.launches.append(block)
        self.grids.append(config._obj.grid[0])
        return 0


class FakePlatform:
    """CPU tensors take the place of CUDA tensors."""

    device_type = "cpu"

    def __init__(self, world_size: int = 2, num_sms: int = 128 + settings().sm_reserve) -> None:
        self.backing_of_group = FakeBacking(world_size)
        self.fake_streams = FakeStreams()
        self.stream = 7
        self.group_obstacle = ""
        self.nodes: tuple[int, ...] = ()
        self.link_failure: TransportError | None = None
        self.proxy_failure: TransportError | None = None
        self.proxy_calls_driver = True
        self.closed_links: list[int] = []
        self.loaded: list[KernelConfig] = []
        self.compiled_together: list[tuple[str, ...]] = []
        self._num_sms = num_sms
        self._memory = ctypes.create_string_buffer(16 * 64 + 64)

    def num_sms(self, device: torch.device) -> int:
        return self._num_sms

    def streams(self, device: torch.device) -> FakeStreams:
        return self.fake_streams

    def host(self, device: torch.device) -> Host:
        return Host(
            device_idx=0,
            current_device=int,
            current_stream=lambda: self.stream,
            empty=torch._C._dynamo.guards._empty_strided_cpu,
        )

    def is_capturing(self) -> bool:
        return self.fake_streams.capturing != 0

    def survey(self, exchange: Exchange, device: torch.device) -> Survey:
        exchange.gather("devices", "")
        placement = Placement(nodes=self.nodes or (0,) * exchange.world_size)
        return Survey(obstacle=self.group_obstacle, placement=placement, network="emulated")

    def network(self, exchange: Exchange, device: torch.device, survey: Survey) -> tuple[GroupNetwork, FakeBacking]:
        return GroupNetwork(placement=survey.placement, open=self.open_link), self.backing_of_group

    def open_link(self, exchange: Exchange, buffer: SymmetricBuffer, layout: WorkspaceLayout) -> NetworkLink:
        """Of rank 0, to nobody."""
        if self.link_failure is not None:
            raise self.link_failure
        shape = NetworkShape(node=0, nodes=layout.nodes, local=0, world=layout.world)
        table = NetworkTable(shape=shape, ring_control=1 << 30, ring_slots=1 << 31, capacity=1024)

        is_closed = threading.Event()

        def check() -> None:
            if is_closed.is_set():
                raise MkcompileError("this proxy has been closed")
            if self.proxy_failure is not None:
                raise self.proxy_failure

        def close() -> None:
            is_closed.set()
            self.closed_links.append(layout.total_bytes)

        return NetworkLink(
            table=table, check=check, close=close, counters=self.counters_of_proxy,
            calls_driver=self.proxy_calls_driver,
        )  # fmt: skip

    def counters_of_proxy(self) -> dict[str, int]:
        """All the same."""
        return dict.fromkeys(COUNTERS, 3)

    def backing(self, device: torch.device, group: str) -> FakeBacking:
        return self.backing_of_group

    def fault_memory(self, device: torch.device) -> HostMemory:
        address = -(-ctypes.addressof(self._memory) // 64) * 64
        return HostMemory(address=address, size_bytes=16 * 64)

    def compile(self, configs: Sequence[KernelConfig]) -> None:
        self.compiled_together.append(tuple(config.broadcast for config in configs))

    def load(self, config: KernelConfig, device: torch.device) -> LoadedKernel:
        self.loaded.append(config)
        return LoadedKernel(config=config, device_idx=0, function=ctypes.c_void_p(1))

    def engine(self, device: torch.device, streams: Any) -> EngineDevice:
        one = ctypes.c_void_p(1)
        sides = SideStreams(streams, create=count(99).__next__)
        return EngineDevice(gate=one, open=one, arrivals=one, audit=one, sides=sides)

    def mover(self, device: torch.device, streams: Any) -> MoverDevice:
        return MoverDevice(function=ctypes.c_void_p(1), sides=SideStreams(streams, create=count(90).__next__))

    def report(self, slot: int, **words: int) -> None:
        """As a kernel would: the code is written last."""
        memory = self.fault_memory(torch.device("cpu"))
        report = abi.FaultReport.from_address(memory.address + slot * 64)
        for name, value in words.items():
            setattr(report, name, value)


@contextmanager
def lone_group(world_size: int = 2) -> Iterator[str]:
    """The name of a group of which only this rank is here."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=world_size)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD.group_name
    finally:
        dist.destroy_process_group()
