"""Messages between ranks with credits, as a kernel's send and receive roles exchange them, checked byte by byte."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from mkcompile.runtime.proxy import Command, Local, Proxy, ProxyConfig, Region, connect

SLOTS = 4
SLOT_BYTES = 1 << 16
FLAGS_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A rank's region: flags, then for each peer slots to receive into and slots to send from.

    Flag (peer, slot, 0) says that the peer's message is there, flag (peer, slot, 1) that the peer has read ours.
    """

    memory: torch.Tensor
    rank: int
    world_size: int

    @classmethod
    def make(cls, rank: int, world_size: int) -> Side:
        size = FLAGS_BYTES + 2 * world_size * SLOTS * SLOT_BYTES
        return cls(memory=torch.zeros(size, dtype=torch.uint8), rank=rank, world_size=world_size)

    def region(self) -> Region:
        return Region(
            address=self.memory.data_ptr(),
            size_bytes=self.memory.numel(),
            flags_offset_bytes=0,
            num_flags=2 * self.world_size * SLOTS,
            keep=self.memory,
        )

    def offset(self, peer: int, slot: int, is_sending: bool) -> int:
        return FLAGS_BYTES + ((int(is_sending) * self.world_size + peer) * SLOTS + slot) * SLOT_BYTES

    def flag(self, peer: int, slot: int, is_credit: bool) -> int:
        return (int(is_credit) * self.world_size + peer) * SLOTS + slot

    def at(self, offset: int, size: int) -> np.ndarray:
        values: np.ndarray = self.memory[offset : offset + size].numpy()
        return values


def message(sender: int, receiver: int, number: int) -> np.ndarray:
    """What message `number` holds; both sides make the same up. Sizes are log-uniform."""
    random = np.random.default_rng((sender, receiver, number))
    size = int(2 ** random.uniform(0, np.log2(SLOT_BYTES)))
    return random.integers(0, 256, size, dtype=np.uint8)


def send(proxy: Proxy, side: Side, peer: int, number: int) -> None:
    slot, epoch = number % SLOTS, number // SLOTS + 1
    if epoch > 1:
        proxy.wait(side.flag(peer, slot, True), epoch - 1, peer)
    data = message(side.rank, peer, number)
    source = side.offset(peer, slot, True)
    side.at(source, data.size)[:] = data
    proxy.push(
        Command(
            source_offset=source,
            destination_offset=side.offset(side.rank, slot, False),
            bytes=data.size,
            peer=peer,
            chunk=side.flag(side.rank, slot, False),
            epoch=epoch,
        )
    )


def receive(proxy: Proxy, side: Side, peer: int, number: int) -> tuple[bool, int]:
    """Is it what the peer sent? Gives the slot back, by the command of this ticket."""
    slot, epoch = number % SLOTS, number // SLOTS + 1
    proxy.wait(side.flag(peer, slot, False), epoch, peer)
    data = message(peer, side.rank, number)
    is_right = bool((side.at(side.offset(peer, slot, False), data.size) == data).all())
    return is_right, proxy.push(Command(peer=peer, chunk=side.flag(side.rank, slot, True), epoch=epoch))


def exchange(proxy: Proxy, side: Side, num_messages: int, first: int = 0) -> int:
    """With every peer; the number of right messages. All that this rank owes its peers is on its way at the end."""
    peers = [peer for peer in range(side.world_size) if peer != side.rank]
    right, ticket = 0, 0
    for number in range(first, first + num_messages):
        for peer in peers:
            send(proxy, side, peer, number)
        for peer in peers:
            is_right, ticket = receive(proxy, side, peer, number)
            right += is_right
    proxy.wait_retired(ticket)
    return right


def join(config: ProxyConfig, timeout_s: float = 0.0) -> tuple[Proxy, Side]:
    """A proxy of this rank in the world's group."""
    group = dist.group.WORLD
    assert group is not None
    side = Side.make(group.rank(), group.size())
    return connect(group, Local(region=side.region()), config, timeout_s), side
