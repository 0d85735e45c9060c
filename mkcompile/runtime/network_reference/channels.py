"""Messages between all ranks of a group, with credits: what a kernel's send and receive roles do, done by the host.

To another node the proxy carries a message. Inside a node the sender writes it into the receiver's memory, which both
have mapped, as a GPU stores over NVLink, and the proxy carries the flag alone. So every wait sees the proxy's error.

Each pair of ranks has a ring of slots in either direction. Messages of a pair are read in the order of their sending.
"""

from __future__ import annotations

import logging
import os
import tempfile
import weakref
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mkcompile.config import settings
from mkcompile.errors import ProxyUnavailableError, TransportError
from mkcompile.plan.placement import Placement
from mkcompile.runtime.exchange import Exchange
from mkcompile.runtime.proxy import Command, Local, Proxy, ProxyConfig, Region, configured, connect

_LOG = logging.getLogger(__name__)
_SHARED = Path("/dev/shm")
_PAGE_BYTES, _WORD_BYTES = 4096, 4
_MOST_SLOT_BYTES, _LEAST_SLOT_BYTES = 256 << 10, 4 << 10
_REGION_FRACTION = 4
_GOODBYE_S = 2.0
# The host waits in the library, not on its own: a proxy with nothing to do soon gives its processor away.
_IDLE_SPIN_US = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A rank's memory: flags, then for each peer slots that it writes into and slots that are sent to it. Bytes."""

    world_size: int
    slots: int
    slot_bytes: int

    @classmethod
    def of(cls, placement: Placement) -> Layout:
        """Two rounds of messages for each pair; slots of 256 KiB, smaller where the ranks are many."""
        world_size, slots = placement.world_size, 2 * placement.num_nodes
        room = settings().arena_bytes // _REGION_FRACTION // (2 * world_size * slots)
        slot_bytes = max(_LEAST_SLOT_BYTES, min(_MOST_SLOT_BYTES, room)) // _PAGE_BYTES * _PAGE_BYTES
        return cls(world_size=world_size, slots=slots, slot_bytes=slot_bytes)

    @property
    def num_flags(self) -> int:
        """A flag that a slot is full, in the receiver's memory; one that it is free again, in the sender's."""
        return 2 * self.world_size * self.slots

    @property
    def size_bytes(self) -> int:
        """All of it."""
        return self._data + 2 * self.world_size * self.slots * self.slot_bytes

    @property
    def _data(self) -> int:
        return -(-self.num_flags * _WORD_BYTES // _PAGE_BYTES) * _PAGE_BYTES

    def full(self, sender: int, slot: int) -> int:
        """The flag behind a message, in the receiver's memory."""
        return sender * self.slots + slot

    def free(self, receiver: int, slot: int) -> int:
        """The credit for a message, in the sender's memory."""
        return (self.world_size + receiver) * self.slots + slot

    def inbox(self, sender: int, slot: int) -> int:
        """Where a peer writes."""
        return self._data + (sender * self.slots + slot) * self.slot_bytes

    def outbox(self, receiver: int, slot: int) -> int:
        """What is sent to a peer on another node."""
        return self._data + ((self.world_size + receiver) * self.slots + slot) * self.slot_bytes


@dataclass(slots=True, weakref_slot=True, kw_only=True)
class Channels:
    """This rank's ends. `mapped`: the memory of ranks on this node, by rank."""

    proxy: Proxy
    layout: Layout
    rank: int
    mapped: dict[int, Tensor]
    _sent: dict[int, int] = field(default_factory=dict)
    _received: dict[int, int] = field(default_factory=dict)

    def send(self, peer: int, data: Tensor) -> None:
        """Waits for a free slot, not for the arrival. Shapes: any, of at most `slot_bytes`.

        Raises: TransportError, PeerTimeoutError, RingFullError.
        """
        number = self._sent.get(peer, 0)
        self._sent[peer] = number + 1
        slot, epoch = number % self.layout.slots, number // self.layout.slots + 1
        if epoch > 1:
            self.proxy.wait(self.layout.free(peer, slot), epoch - 1, peer)
        flat = data.contiguous().view(-1).view(torch.uint8)
        assert flat.numel() <= self.layout.slot_bytes
        full, inbox = self.layout.full(self.rank, slot), self.layout.inbox(self.rank, slot)
        if peer in self.mapped:
            self.mapped[peer][inbox : inbox + flat.numel()] = flat
            self.proxy.push(Command(peer=peer, chunk=full, epoch=epoch))
            return
        outbox = self.layout.outbox(peer, slot)
        self.mapped[self.rank][outbox : outbox + flat.numel()] = flat
        self.proxy.push(
            Command(
                source_offset=outbox,
                destination_offset=inbox,
                bytes=flat.numel(),
                peer=peer,
                chunk=full,
                epoch=epoch,
            )
        )

    def receive(self, peer: int, out: Tensor) -> Tensor:
        """The peer's next message, copied into `out` (contiguous), which is returned. The slot is then free.

        Raises: TransportError, PeerTimeoutError, RingFullError.
        """
        number = self._received.get(peer, 0)
        self._received[peer] = number + 1
        slot, epoch = number % self.layout.slots, number // self.layout.slots + 1
        self.proxy.wait(self.layout.full(peer, slot), epoch, peer)
        flat, inbox = out.view(-1).view(torch.uint8), self.layout.inbox(peer, slot)
        flat.copy_(self.mapped[self.rank][inbox : inbox + flat.numel()])
        self.proxy.push(Command(peer=peer, chunk=self.layout.free(self.rank, slot), epoch=epoch))
        return out

    def close(self, timeout_s: float = 0.0) -> None:
        """Without time nothing in flight is waited for, and peers take it for a loss."""
        _close(self.proxy, timeout_s)


def open_channels(group: ProcessGroup, exchange: Exchange, placement: Placement) -> Channels:
    """Collective.

    Raises: ProxyUnavailableError, TransportError, PeerTimeoutError, each on all ranks.
    """
    layout = Layout.of(placement)
    mapped = _share_memory(exchange, placement, layout.size_bytes)
    memory = mapped[exchange.rank]
    region = Region(
        address=memory.data_ptr(),
        size_bytes=memory.numel(),
        flags_offset_bytes=0,
        num_flags=layout.num_flags,
        keep=memory,
    )
    asked = ProxyConfig(idle_spin_us=_IDLE_SPIN_US)
    config = configured(group, settings().network, asked, exchange.timeout_s)
    proxy = connect(group, Local(region=region), config, exchange.timeout_s)
    channels = Channels(proxy=proxy, layout=layout, rank=exchange.rank, mapped=mapped)
    # at the end of the process, too: what was sent last may be on its way
    weakref.finalize(channels, _close, proxy, _GOODBYE_S)
    return channels


def _share_memory(exchange: Exchange, placement: Placement, size_bytes: int) -> dict[int, Tensor]:
    """Each rank makes a file in memory, and maps those of its node; nobody needs the names then.

    Raises: ProxyUnavailableError, on all ranks, where one can't map.
    """
    folder = _SHARED if _SHARED.is_dir() else Path(tempfile.gettempdir())
    descriptor, name = tempfile.mkstemp(prefix="mkcompile-", dir=folder)
    os.close(descriptor)
    own = Path(name)
    mapped: dict[int, Tensor] = {}
    problem = ""
    try:
        mapped[exchange.rank] = _map(own, size_bytes).zero_()
        names = exchange.gather("network: memory", name)
        for rank in placement.members(placement.nodes[exchange.rank]):
            if rank != exchange.rank:
                mapped[rank] = _map(Path(names[rank]), size_bytes)
    except (OSError, RuntimeError) as error:
        problem = str(error)
    try:
        exchange.agree("network: mapped", problem, ProxyUnavailableError, "ranks of one node can't share memory")
    finally:
        own.unlink(missing_ok=True)
    return mapped


def _map(path: Path, size_bytes: int) -> Tensor:
    return torch.from_file(str(path), shared=True, size=size_bytes, dtype=torch.uint8)


def _close(proxy: Proxy, timeout_s: float) -> None:
    try:
        proxy.close(timeout_s)
    except TransportError as error:
        _LOG.info("the proxy ended with %s", error)
