"""Rank 1 of the exchange by other people's code: pyverbs, and the proxy's wire format written down once more.

Runs in the virtual machine, by the system's Python (python3-pyverbs is built for that one). It writes data, then flags,
into rank 0's region, checks what rank 0 writes, and reads the source of each message out of rank 0's memory.
"""

from __future__ import annotations

import ctypes
import math
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pyverbs.enums as verbs
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

DEVICE, PORT, RANK, PEER = "rxe1", 1, 1, 0
ACCESS = verbs.IBV_ACCESS_LOCAL_WRITE | verbs.IBV_ACCESS_REMOTE_WRITE | verbs.IBV_ACCESS_REMOTE_READ
POISON, GUARD, GROUP = 0xEE, 64, 8
MASK = (1 << 64) - 1
LIMIT_S = 60.0
DEPTH = 64

# csrc/host/session.cc: Header; csrc/host/verbs/link.h: Endpoint
HEADER = struct.Struct("<8IQ")
ENDPOINT = struct.Struct("<16sHBBIQQQIIIIQ64I")
LINE_BYTES = 16  # host_words.h: Line, which begins with the goodbye


class Channel:
    """Frames of a length and as many bytes, as tests/rdma/processes.cc has them."""

    def __init__(self) -> None:
        self._socket = socket.socket(fileno=int(os.environ["CHANNEL"]))
        self._socket.settimeout(LIMIT_S)

    def send(self, data: bytes) -> None:
        self._socket.sendall(struct.pack("<I", len(data)) + data)

    def receive(self) -> bytes:
        (size,) = struct.unpack("<I", self._socket.recv(4, socket.MSG_WAITALL))
        return self._socket.recv(size, socket.MSG_WAITALL) if size else b""

    def meet(self) -> None:
        self.send(b"")
        assert self.receive() == b""


@dataclass(frozen=True)
class Message:
    """Offsets are inside of slots."""

    source: int
    destination: int
    data: bytes


@dataclass(frozen=True)
class Plan:
    """tests/host/messages.h"""

    messages: int
    slots: int
    max_bytes: int
    seed: int

    @property
    def slot_bytes(self) -> int:
        return self.max_bytes + 4 * GUARD

    @property
    def receive(self) -> int:
        return (8 * self.slots + 255) // 256 * 256

    @property
    def send(self) -> int:
        return self.receive + self.slots * self.slot_bytes

    @property
    def end(self) -> int:
        return self.send + self.slots * self.slot_bytes

    def epoch(self, number: int) -> int:
        return (number // self.slots + 1) * 1000 + number % 7

    def message(self, rank: int, number: int) -> Message:
        draws = _draws(self.seed * 1_000_003 + number * 2 + rank)
        exponent = math.log2(self.max_bytes) * ((next(draws) >> 11) * 2.0**-53)
        size = min(int(2.0**exponent + 0.5), self.max_bytes)
        room = self.max_bytes + 2 * GUARD - size
        source, destination = GUARD + next(draws) % room, GUARD + next(draws) % room
        return Message(source=source, destination=destination, data=_contents(next(draws), size))


def _draws(state: int) -> Iterator[int]:
    while True:
        state = (state + 0x9E3779B97F4A7C15) & MASK
        mixed = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & MASK
        yield mixed ^ (mixed >> 31)


def _contents(state: int, size: int) -> bytes:
    words = []
    for _ in range(0, size, 8):
        state = (state * 6364136223846793005 + 1442695040888963407) & MASK
        words.append(state)
    return struct.pack(f"<{len(words)}Q", *words)[:size]


class Memory:
    """One registration: the region, then words that peers write (goodbyes), staged flags, and room to read into."""

    def __init__(self, domain: PD, plan: Plan, host_bytes: int) -> None:
        self.host = (plan.end + 63) // 64 * 64
        self.staged = self.host + host_bytes
        self.scratch = self.staged + 4 * 2 * plan.slots
        self.registered = MR(domain, self.scratch + plan.max_bytes, ACCESS)
        self.base = self.registered.buf
        self.put(0, bytes(self.scratch))
        self.put(plan.receive, bytes([POISON]) * (plan.slots * plan.slot_bytes))

    def get(self, offset: int, size: int) -> bytes:
        return ctypes.string_at(self.base + offset, size)

    def put(self, offset: int, data: bytes) -> None:
        ctypes.memmove(self.base + offset, data, len(data))

    def word(self, offset: int) -> int:
        return int(struct.unpack("<I", self.get(offset, 4))[0])


class Link:
    """A reliable connection, and what it has on its way."""

    def __init__(self, context: Context, domain: PD, memory: Memory) -> None:
        self._memory = memory
        self._completed = CQ(context, 2 * DEPTH)
        capacity = QPCap(max_send_wr=DEPTH, max_recv_wr=1)
        attributes = QPInitAttr(qp_type=verbs.IBV_QPT_RC, scq=self._completed, rcq=self._completed, cap=capacity)
        self.queue = QP(domain, attributes)
        self._in_flight = 0

    def join(self, gid: GID, gid_index: int, number: int, mtu: int) -> None:
        attributes = QPAttr(port_num=PORT)
        attributes.qp_access_flags = ACCESS
        attributes.dest_qp_num, attributes.path_mtu = number, mtu
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 1
        attributes.retry_cnt, attributes.rnr_retry, attributes.min_rnr_timer, attributes.timeout = 6, 7, 1, 14
        route = GlobalRoute(dgid=gid, sgid_index=gid_index, hop_limit=64)
        attributes.ah_attr = AHAttr(port_num=PORT, is_global=1, gr=route)
        self.queue.to_rts(attributes)

    def post(self, operation: int, local: int, size: int, remote: int, key: int) -> None:
        """`local` is an offset, `remote` an address."""
        while self._in_flight >= DEPTH:
            self.poll()
        part = SGE(self._memory.base + local, size, self._memory.registered.lkey)
        request = SendWR(num_sge=1, sg=[part], opcode=operation, send_flags=verbs.IBV_SEND_SIGNALED)
        request.set_wr_rdma(key, remote)
        self.queue.post_send(request)
        self._in_flight += 1

    def poll(self) -> None:
        found, completions = self._completed.poll(16)
        for completion in completions[:found]:
            assert completion.status == verbs.IBV_WC_SUCCESS, f"status {completion.status}"
        self._in_flight -= found

    def drain(self) -> None:
        while self._in_flight:
            self.poll()


class Rank:
    """The exchange as tests/rdma/stream.cc has it, of rank 1."""

    def __init__(self, plan: Plan, channel: Channel) -> None:
        self.plan = plan
        theirs = channel.receive()
        magic, version, _, *alike, region_bytes = HEADER.unpack_from(theirs)
        fields = ENDPOINT.unpack_from(theirs, HEADER.size)
        assert len(theirs) == HEADER.size + ENDPOINT.size and fields[4] == 1, "the wire format is another one"
        self._region, self._flags, self._host, self._region_key, self._host_key = *fields[5:8], *fields[8:10]
        context = Context(name=DEVICE)
        domain = PD(context)
        counts, receive_depth, host_bytes = fields[3], fields[11], fields[12]
        assert counts == 0, "rank 0 counts, though Soft-RoCE keeps the order of writes"
        self.memory = Memory(domain, plan, host_bytes)
        self.link = Link(context, domain, self.memory)
        index, gid = _address(context)
        numbers = [self.link.queue.qp_num, *[0] * 63]
        key, base = self.memory.registered.rkey, self.memory.base
        keys = (key, key, 2 * plan.slots, receive_depth, host_bytes)
        endpoint = (_raw(gid), 0, fields[2], counts, 1, base, 0, base + self.memory.host, *keys, *numbers)
        channel.send(HEADER.pack(magic, version, RANK, *alike, region_bytes) + ENDPOINT.pack(*endpoint))
        their_gid = GID(":".join(fields[0].hex()[i : i + 4] for i in range(0, 32, 4)))
        self.link.join(their_gid, index, fields[13], fields[2])
        self.sent = self.received = self.read = 0

    def run(self) -> None:
        moved_s = time.monotonic()
        while self.sent < self.plan.messages or self.received < self.plan.messages:
            if self._send() | self._receive():
                moved_s = time.monotonic()
            self.link.poll()
            assert time.monotonic() - moved_s < LIMIT_S, f"{self.sent} sent, {self.received} received, then nothing"
        self.link.drain()

    def _has(self, flag: int, epoch: int) -> bool:
        return (self.memory.word(4 * flag) - epoch) & 0xFFFFFFFF < 0x80000000

    def _send(self) -> bool:
        plan, slot = self.plan, self.sent % self.plan.slots
        if self.sent == plan.messages:
            return False
        if self.sent >= plan.slots and self.sent % GROUP == 0:
            last = self.sent - plan.slots + GROUP - 1
            if not self._has(plan.slots + slot // GROUP, plan.epoch(last)):
                return False
        message = plan.message(RANK, self.sent)
        source = plan.send + slot * plan.slot_bytes + message.source
        destination = self._region + plan.receive + slot * plan.slot_bytes + message.destination
        self.memory.put(source, message.data)
        self.link.post(verbs.IBV_WR_RDMA_WRITE, source, len(message.data), destination, self._region_key)
        self._set_flag(slot, plan.epoch(self.sent))
        self.sent += 1
        return True

    def _set_flag(self, flag: int, epoch: int) -> None:
        staged = self.memory.staged + 4 * flag
        self.memory.put(staged, struct.pack("<I", epoch))
        remote = self._region + self._flags + 4 * flag
        self.link.post(verbs.IBV_WR_RDMA_WRITE, staged, 4, remote, self._region_key)

    def _receive(self) -> bool:
        plan, number = self.plan, self.received
        slot = number % plan.slots
        if number == plan.messages or not self._has(slot, plan.epoch(number)):
            return False
        message, at = plan.message(PEER, number), plan.receive + slot * plan.slot_bytes
        expected = bytearray([POISON]) * plan.slot_bytes
        expected[message.destination : message.destination + len(message.data)] = message.data
        assert self.memory.get(at, plan.slot_bytes) == expected, f"message {number}: wrong bytes"
        self._compare_source(slot, message, number)
        self.memory.put(at, bytes([POISON]) * plan.slot_bytes)
        self.received += 1
        if self.received % GROUP == 0:
            self._set_flag(plan.slots + slot // GROUP, plan.epoch(number))
        return True

    def _compare_source(self, slot: int, message: Message, number: int) -> None:
        """Until the credit the message still lies in the sender's memory."""
        source = self._region + self.plan.send + slot * self.plan.slot_bytes + message.source
        self.link.post(verbs.IBV_WR_RDMA_READ, self.memory.scratch, len(message.data), source, self._region_key)
        self.link.drain()
        assert self.memory.get(self.memory.scratch, len(message.data)) == message.data, f"message {number}: wrong read"
        self.read += 1

    def say_goodbye(self) -> None:
        """The line of our link (rank 1, link 0) in the peer's memory."""
        self.memory.put(self.memory.staged, struct.pack("<I", 1))
        self.link.post(verbs.IBV_WR_RDMA_WRITE, self.memory.staged, 4, self._host + LINE_BYTES * RANK, self._host_key)
        self.link.drain()


def _raw(gid: GID) -> bytes:
    return bytes.fromhex(str(gid).replace(":", ""))


def _address(context: Context) -> tuple[int, GID]:
    """RoCE version 2 with an IPv4 address: in this machine the second entry."""
    gid = context.query_gid(PORT, 1)
    assert "ffff:" in str(gid), gid
    return 1, gid


def main() -> None:
    channel = Channel()
    plan = Plan(*map(int, channel.receive().split()))
    rank = Rank(plan, channel)
    channel.meet()
    rank.run()
    channel.meet()
    rank.say_goodbye()
    sys.stdout.write(f"  pyverbs: {rank.sent} written, {rank.received} received, {rank.read} read\n")


if __name__ == "__main__":
    main()
