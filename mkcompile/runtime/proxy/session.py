"""One proxy of this process: commands out, flags in, counters, timeline. `bootstrap.py` makes and connects it.

Every method first raises what the proxy has reported, if it has failed. Every wait has a limit.
"""

from __future__ import annotations

import ctypes
import errno
import weakref
from dataclasses import dataclass

from mkcompile.errors import MkcompileError, OptionError, PeerTimeoutError, WaitReport
from mkcompile.runtime.proxy import abi
from mkcompile.runtime.proxy.failures import exception_of, ring_full
from mkcompile.runtime.proxy.library import library
from mkcompile.runtime.proxy.settings import Hooks, ProxyConfig, Region, Ring

_NS_PER_S = 1_000_000_000
_NS_PER_US = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank of a group, and how long it waits for the others.

    `ranks`: the group's ranks as numbered in the whole job, which is how errors name them. Units: seconds.
    """

    rank: int
    ranks: tuple[int, ...]
    timeout_s: float

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return len(self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyEvent:
    """One event of the timeline. Units: nanoseconds of CLOCK_MONOTONIC, bytes. Arrivals have no ticket and no bytes."""

    time_ns: int
    kind: str
    ticket: int
    peer: int
    lane: int
    chunk: int
    epoch: int
    num_bytes: int


def proxy_options(place: Place, region: Region, config: ProxyConfig, hooks: Hooks, ring: Ring) -> abi.ProxyOptions:
    """All of it as the library takes it. Raises: OptionError where several devices are left to choose from."""
    if "," in config.device:
        raise OptionError(f"a proxy has one device, got {config.device}: with_nic() chooses")
    options = abi.ProxyOptions(
        region_base=region.address,
        region_bytes=region.size_bytes,
        flags_offset=region.flags_offset_bytes,
        num_flags=region.num_flags,
        memory_kind=abi.CUDA_MEMORY if region.is_cuda else abi.HOST_MEMORY,
        dmabuf=region.dmabuf,
        dmabuf_offset=region.dmabuf_offset_bytes,
        ring_control=ring.control,
        ring_slots=ring.slots,
        rank=place.rank,
        world=place.world_size,
        timeout_ns=int(place.timeout_s * _NS_PER_S),
        transport=abi.TRANSPORTS.index(config.transport),
        device=config.device.encode(),
        window_ns=int(config.window_us * _NS_PER_US),
        idle_spin_ns=int(config.idle_spin_us * _NS_PER_US),
        bandwidth_bytes_per_s=int(config.link.bandwidth_gbps * 1e9),
        latency_ns=int(config.link.latency_us * _NS_PER_US),
        shuffle_ns=int(config.link.shuffle_us * _NS_PER_US),
        order=abi.ORDERS.index(config.link.order),
        write_order=abi.WRITE_ORDERS.index(hooks.write_order),
        always_bounces=config.bounces,
    )
    for name in ("lanes", "max_outstanding", "ring_capacity", "timeline_capacity", "seed"):
        setattr(options, name, getattr(config, name))
    for name in Hooks.__dataclass_fields__.keys() - {"keep", "write_order"}:
        setattr(options, name, getattr(hooks, name))
    return options


def _close(handle: int, limit_ns: int) -> abi.Error:
    error = abi.Error()
    library().mk_proxy_close(handle, limit_ns, ctypes.byref(error))
    return error


class Proxy:
    """A proxy whose device is open and whose region is registered.

    Raises, when made: TransportError of the kind that fits; ProxyUnavailableError where there is no library.
    """

    def __init__(self, place: Place, region: Region, config: ProxyConfig, hooks: Hooks, ring: Ring) -> None:
        self.place = place
        self.config = config
        self._library = library()
        self._keep = (region, hooks, ring)
        handle, error = ctypes.c_void_p(), abi.Error()
        options = proxy_options(place, region, config, hooks, ring)
        if self._library.mk_proxy_open(ctypes.byref(options), ctypes.byref(handle), ctypes.byref(error)):
            raise exception_of(error, place.ranks)
        assert handle.value is not None
        self._handle = handle.value
        self._finalizer = weakref.finalize(self, _close, self._handle, 0)

    # making connections; bootstrap.py calls these in order

    def endpoint(self, peer: int) -> bytes:
        """What `peer` has to be given. Raises: TransportError."""
        room = (ctypes.c_uint8 * abi.MAX_ENDPOINT_BYTES)()
        used, error = ctypes.c_uint32(len(room)), abi.Error()
        if self._library.mk_proxy_endpoint(self._open(), peer, room, ctypes.byref(used), ctypes.byref(error)):
            raise exception_of(error, self.place.ranks)
        return bytes(room[: used.value])

    def connect(self, peer: int, endpoint: bytes) -> None:
        """Take what `peer` made for this rank. Raises: TransportError."""
        error, data = abi.Error(), (ctypes.c_uint8 * len(endpoint)).from_buffer_copy(endpoint)
        if self._library.mk_proxy_connect(self._open(), peer, data, len(endpoint), ctypes.byref(error)):
            raise exception_of(error, self.place.ranks)

    def finish(self) -> None:
        """Wait until every peer is connected. Raises: TransportError, which names a peer that is not."""
        error = abi.Error()
        if self._library.mk_proxy_finish(self._open(), self._limit_ns(None), ctypes.byref(error)):
            raise exception_of(error, self.place.ranks)

    def start(self) -> None:
        """Start the thread. Raises: TransportError."""
        error = abi.Error()
        if self._library.mk_proxy_start(self._open(), ctypes.byref(error)):
            raise exception_of(error, self.place.ranks)

    # a running proxy

    def check(self) -> None:
        """Raise the proxy's first failure, if it has failed."""
        error = abi.Error()
        if self._library.mk_proxy_fault(self._open(), ctypes.byref(error)):
            raise exception_of(error, self.place.ranks)

    def push(self, command: abi.Command, timeout_s: float | None = None) -> int:
        """Publish a command from the host; not on a ring that kernels use. Returns its ticket.

        Raises: RingFullError; TransportError where the proxy has failed.
        """
        self.check()
        ticket = ctypes.c_uint64()
        limit_ns = self._limit_ns(timeout_s)
        status = self._library.mk_proxy_push(self._open(), ctypes.byref(command), limit_ns, ctypes.byref(ticket))
        if status:
            self.check()
            raise ring_full(self.config.ring_capacity, self.device)
        return ticket.value

    def wait_retired(self, ticket: int, timeout_s: float | None = None) -> None:
        """Wait until all commands up to this one have left their source memory.

        Raises: PeerTimeoutError; TransportError where the proxy has failed.
        """
        self.check()
        limit_s = self.place.timeout_s if timeout_s is None else timeout_s
        if self._library.mk_proxy_wait_retired(self._open(), ticket, self._limit_ns(timeout_s)):
            self.check()
            raise PeerTimeoutError(self._report("retired", -1, ticket, 0, limit_s))

    def wait(self, chunk: int, epoch: int, peer: int = -1, timeout_s: float | None = None) -> int:
        """Wait until the arrival flag `chunk` has reached `epoch`. Returns what it holds. Host memory only.

        `peer` is who writes the flag, for the error.
        Raises: PeerTimeoutError; TransportError where the proxy has failed.
        """
        self.check()
        seen = ctypes.c_uint32()
        limit_s = self.place.timeout_s if timeout_s is None else timeout_s
        limit_ns = self._limit_ns(timeout_s)
        status = self._library.mk_proxy_wait_flag(self._open(), chunk, epoch, limit_ns, ctypes.byref(seen))
        if status == errno.EINVAL:
            raise IndexError(f"no flag {chunk} that the host can read")
        if status:
            self.check()
            raise PeerTimeoutError(self._report("arrival", peer, epoch, seen.value, limit_s, chunk))
        return seen.value

    def close(self, timeout_s: float | None = None) -> None:
        """Let what is in flight end, then end the proxy; idempotent.

        Raises: TransportError where commands had to be dropped.
        """
        if self._finalizer.detach() is None:
            return
        handle, self._handle = self._handle, 0
        error = _close(handle, self._limit_ns(timeout_s))
        if error.number:
            raise exception_of(error, self.place.ranks)

    # what can be seen of it

    @property
    def facts(self) -> abi.Facts:
        """Addresses of the ring, registration, device."""
        facts = abi.Facts()
        self._library.mk_proxy_facts(self._open(), ctypes.byref(facts))
        return facts

    @property
    def device(self) -> str:
        """NIC or interface in use."""
        return str(self.facts.device.decode(errors="replace"))

    @property
    def registration(self) -> str:
        """How the network reaches the region: one of `abi.REGISTRATIONS`."""
        return abi.REGISTRATIONS[self.facts.registration]

    @property
    def counts(self) -> bool:
        """Does this proxy publish the flags of its region? Else the senders' NICs write them."""
        return bool(self.facts.counts)

    def counters(self) -> dict[str, int]:
        """Counters by name, as they stand; the proxy runs on."""
        values = (ctypes.c_uint64 * abi.NUM_COUNTERS)()
        self._library.mk_proxy_counters(self._open(), values)
        return dict(zip(abi.COUNTERS, values, strict=False))

    def timeline(self, first: int = 0) -> tuple[list[ProxyEvent], int]:
        """Events from number `first` on, as far as they are still there, and the number to ask for the next time."""
        room = (abi.ProxyEvent * max(self.config.timeline_capacity, 1))()
        following = ctypes.c_uint64()
        count = self._library.mk_proxy_timeline(self._open(), first, room, len(room), ctypes.byref(following))
        return [_event_of(room[i]) for i in range(count)], following.value

    def _open(self) -> int:
        if not self._handle:
            raise MkcompileError("this proxy has been closed")
        return self._handle

    def _limit_ns(self, timeout_s: float | None) -> int:
        return int((self.place.timeout_s if timeout_s is None else timeout_s) * _NS_PER_S)

    def _report(self, what: str, peer: int, expected: int, seen: int, waited_s: float, chunk: int = -1) -> WaitReport:
        return WaitReport(
            operator=what,
            rank=self.place.ranks[self.place.rank],
            peer=self.place.ranks[peer] if peer >= 0 else peer,
            role="the host",
            tile=chunk,
            expected=expected,
            seen=seen,
            waited_s=waited_s,
        )


def _event_of(event: abi.ProxyEvent) -> ProxyEvent:
    return ProxyEvent(
        time_ns=event.time_ns,
        kind=abi.EVENT_KINDS[event.kind_and_lane & 0xFF],
        ticket=event.ticket,
        peer=event.peer,
        lane=event.kind_and_lane >> 8,
        chunk=event.chunk,
        epoch=event.epoch,
        num_bytes=event.bytes,
    )
