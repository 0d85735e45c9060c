"""What a proxy is asked to be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from mkcompile.errors import OptionError
from mkcompile.runtime.proxy import abi

Transport = Literal["emulated", "tcp", "rc", "unordered", "srd"]
Order = Literal["in_order", "shuffled", "uncounted"]
WriteOrder = Literal["in order", "flushed", "unordered"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The emulated network. Units: GB/s (0: no limit), microseconds. `uncounted` is wrong on purpose, for tests."""

    bandwidth_gbps: float = 0.0
    latency_us: float = 0.0
    shuffle_us: float = 0.0
    order: Order = "in_order"

    def __post_init__(self) -> None:
        if min(self.bandwidth_gbps, self.latency_us, self.shuffle_us) < 0:
            raise OptionError("an emulated link has no negative bandwidth or time")
        if self.order not in get_args(Order):
            raise OptionError(f"order must be one of {', '.join(get_args(Order))}; got {self.order!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig:
    """Settings of one proxy; those marked * must be equal on all ranks, which the ranks check when they meet.

    `transport`*; `device`: NIC ("mlx5_0", or "mlx5_0/2" for its second port) or interface, empty: chosen automatically;
    `bounces`: data goes through a bounce buffer, though the network may reach the region; `lanes`*: connections to each
    peer; `max_outstanding`*: commands in flight; `window_us`: how long a command waits for others of its connection;
    `idle_spin_us`: how long an idle proxy looks at full speed. Units: microseconds; records.
    """

    transport: Transport = "tcp"
    device: str = ""
    bounces: bool = False
    lanes: int = 1
    max_outstanding: int = 256
    ring_capacity: int = 4096
    timeline_capacity: int = 4096
    window_us: float = 2.0
    idle_spin_us: float = 1000.0
    seed: int = 0
    link: Link = field(default_factory=Link)

    def __post_init__(self) -> None:
        if self.transport not in abi.TRANSPORTS:
            raise OptionError(f"transport must be one of {', '.join(abi.TRANSPORTS)}; got {self.transport!r}")
        for name in self.device.split(","):  # several: `with_nic` chooses
            if len(name.encode()) >= abi.DEVICE_NAME_BYTES:
                raise OptionError(f"device name {name!r} is too long")
        if min(self.lanes, self.max_outstanding, self.ring_capacity) < 1 or self.timeline_capacity < 0:
            raise OptionError("lanes, max_outstanding and ring_capacity are at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """C functions (addresses) for memory that the CPU can't touch; `csrc/host/transport.h` has their types.

    `write_order`: does a kernel that polls a flag see what a NIC wrote before it? `flushed`: after the flush of whoever
    stores the flags; `unordered`: never. `bounce_*` is pinned memory for `tcp`; `peer_bases` is the address of an array
    with every rank's region as mapped here (emulated). 0: none. `keep` owns what the addresses belong to.
    """

    copy_context: int = 0
    copy_start: int = 0
    copy_finished: int = 0
    copy_pin: int = 0
    copy_unpin: int = 0
    flag_context: int = 0
    flag_flush: int = 0
    flag_write: int = 0
    flag_commit: int = 0
    bounce_base: int = 0
    bounce_bytes: int = 0
    peer_bases: int = 0
    write_order: WriteOrder = "in order"
    keep: object = None

    def __post_init__(self) -> None:
        if self.write_order not in get_args(WriteOrder):
            raise OptionError(f"write_order must be one of {', '.join(get_args(WriteOrder))}; got {self.write_order!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Memory that peers write and this rank sends from: data and arrival flags (32-bit words) in one block.

    `keep` owns the memory. `dmabuf`: a descriptor that covers it, or -1. Units: bytes.
    """

    address: int
    size_bytes: int
    flags_offset_bytes: int
    num_flags: int
    is_cuda: bool = False
    dmabuf: int = -1
    dmabuf_offset_bytes: int = 0
    keep: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Pinned, zeroed memory for the command ring, where kernels publish; both 0: the proxy allocates it."""

    control: int = 0
    slots: int = 0
    keep: object = None
