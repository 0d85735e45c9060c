"""Rank 1 of the exchange by other people's code: pyverbs, and the proxy's wire format written down once more.

Runs in the virtual machine, by the system's Python (python3-pyverbs is built for that one). It writes into rank 0's
region, data then flags (rc) or pieces with immediates in any order (unordered), checks what rank 0 writes, and reads
the source of each message out of rank 0's memory.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import socket
import struct
import sys
import time
from dataclasses import dataclass

import pyverbs.enums as verbs
from independent_messages import POISON, Message, Plan
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

DEVICE, PORT, RANK, PEER = "rxe1", 1, 1, 0
ACCESS = verbs.IBV_ACCESS_LOCAL_WRITE | verbs.IBV_ACCESS_REMOTE_WRITE | verbs.IBV_ACCESS_REMOTE_READ
GROUP = 8  # messages of one credit
LIMIT_S = 60.0
NAP_S = 0.001
DEPTH, RECEIVES = 64, 128
MOST_PIECES = 3

# csrc/host/session.cc: Header; csrc/host/verbs/link.h: Endpoint; host_words.h: Line (goodbye, credit, ...) and Note
HEADER = struct.Struct("<8IQ")
ENDPOINT = struct.Struct("<16sHBBIQQQIIIIQ64I")
LINE_BYTES, GOODBYE, CREDIT = 16, 0, 4
NOTE = struct.Struct("<QQII")
SLOT_BITS = 20  # arrivals.h: an immediate is pieces << 20 | slot


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
class Peer:
    """What rank 0 says of itself."""

    header: tuple[int, ...]
    gid: GID
    mtu: int
    counts: bool
    region: int
    flags: int
    host: int
    region_key: int
    host_key: int
    receive_depth: int
    host_bytes: int
    queues: tuple[int, ...]

    @classmethod
    def parse(cls, blob: bytes) -> Peer:
        assert len(blob) == HEADER.size + ENDPOINT.size, "the wire format is another one"
        gid, _, mtu, counts, links, region, flags, host, *rest = ENDPOINT.unpack_from(blob, HEADER.size)
        region_key, host_key, _, receive_depth, host_bytes, *queues = rest
        text = ":".join(gid.hex()[i : i + 4] for i in range(0, 32, 4))
        header, queues = HEADER.unpack_from(blob), tuple(queues[:links])
        own = (header, GID(text), mtu, bool(counts), region, flags, host)
        return cls(*own, region_key, host_key, receive_depth, host_bytes, queues)

    def landing(self, slot: int) -> int:
        """Offset of the note of a slot in a rank's host words: after a line for each link and the staged notes."""
        world, max_outstanding = self.header[3], self.header[6]
        return world * len(self.queues) * LINE_BYTES + (max_outstanding + slot) * NOTE.size


class Memory:
    """One registration: the region, then the words that peers write, staged notes, and room to read into."""

    def __init__(self, domain: PD, plan: Plan, host_bytes: int) -> None:
        self.host = (plan.end + 63) // 64 * 64
        self.staged = self.host + host_bytes
        self.scratch = self.staged + NOTE.size * 2 * plan.slots
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
        self._sent, self._received = CQ(context, 2 * DEPTH), CQ(context, RECEIVES)
        capacity = QPCap(max_send_wr=DEPTH, max_recv_wr=RECEIVES)
        attributes = QPInitAttr(qp_type=verbs.IBV_QPT_RC, scq=self._sent, rcq=self._received, cap=capacity)
        self.queue = QP(domain, attributes)
        self._in_flight = 0
        self.immediates = self.reposted = 0

    def join(self, peer: Peer, gid_index: int, number: int) -> None:
        attributes = QPAttr(port_num=PORT)
        attributes.qp_access_flags = ACCESS
        attributes.dest_qp_num, attributes.path_mtu = number, peer.mtu
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 1
        attributes.retry_cnt, attributes.rnr_retry, attributes.min_rnr_timer, attributes.timeout = 6, 7, 1, 16
        route = GlobalRoute(dgid=peer.gid, sgid_index=gid_index, hop_limit=64)
        attributes.ah_attr = AHAttr(port_num=PORT, is_global=1, gr=route)
        self.queue.to_rts(attributes)

    def post_receives(self, count: int) -> None:
        unused = SGE(self._memory.base + self._memory.scratch, 4, self._memory.registered.lkey)  # pyverbs wants one
        for _ in range(count):
            self.queue.post_recv(RecvWR(num_sge=1, sg=[unused]))

    def write(self, local: int, size: int, remote: int, key: int, immediate: int | None = None) -> None:
        """`local` is an offset, `remote` an address."""
        operation = verbs.IBV_WR_RDMA_WRITE if immediate is None else verbs.IBV_WR_RDMA_WRITE_WITH_IMM
        self.immediates += immediate is not None
        self._post(operation, local, size, remote, key, socket.htonl(immediate or 0))

    def read(self, local: int, size: int, remote: int, key: int) -> None:
        self._post(verbs.IBV_WR_RDMA_READ, local, size, remote, key, 0)
        self.drain()

    def _post(self, operation: int, local: int, size: int, remote: int, key: int, immediate: int) -> None:
        while self._in_flight >= DEPTH:
            self.poll()
        part = SGE(self._memory.base + local, size, self._memory.registered.lkey)
        request = SendWR(num_sge=1, sg=[part], opcode=operation, imm_data=immediate)
        request.set_wr_rdma(key, remote)
        self.queue.post_send(request)
        self._in_flight += 1

    def poll(self) -> None:
        found, completions = self._sent.poll(16)
        for completion in completions[:found]:
            assert completion.status == verbs.IBV_WC_SUCCESS, f"status {completion.status}"
        self._in_flight -= found

    def take(self) -> list[int]:
        """Immediates that have come; their receives are posted again."""
        found, completions = self._received.poll(16)
        for completion in completions[:found]:
            assert completion.status == verbs.IBV_WC_SUCCESS, f"receive: status {completion.status}"
        self.post_receives(found)
        self.reposted += found
        return [socket.ntohl(completion.imm_data) for completion in completions[:found]]

    def drain(self) -> None:
        while self._in_flight:
            self.poll()


class Notifier:
    """Flags as `rc` has them: the writer's NIC stores them, after the data, on one connection."""

    def __init__(self, peer: Peer, memory: Memory, links: list[Link]) -> None:
        self.peer, self.memory, self.links = peer, memory, links

    def send(self, source: int, destination: int, size: int, flag: int, epoch: int) -> None:
        """`source` and `destination` are offsets in the regions; a message without bytes is a flag alone."""
        link, key = self.links[0], self.peer.region_key
        if size:
            link.write(source, size, self.peer.region + destination, key)
        staged = self.memory.staged + NOTE.size * flag
        self.memory.put(staged, struct.pack("<I", epoch))
        link.write(staged, 4, self.peer.region + self.peer.flags + 4 * flag, key)

    def progress(self) -> None:
        for link in self.links:
            link.poll()


class CountingNotifier(Notifier):
    """Flags as networks without order have them: whoever receives counts pieces, then reads the note of the slot."""

    def __init__(self, peer: Peer, memory: Memory, links: list[Link]) -> None:
        super().__init__(peer, memory, links)
        self._random = random.Random(1)
        self._seen: dict[int, int] = {}
        for link in links:
            link.post_receives(RECEIVES)

    def send(self, source: int, destination: int, size: int, flag: int, epoch: int) -> None:
        cuts = sorted(self._random.sample(range(1, size), min(MOST_PIECES - 1, size - 1))) if size > 1 else []
        bounds = [0, *cuts, size] if size else []
        staged = self.memory.staged + NOTE.size * flag
        self.memory.put(staged, NOTE.pack(destination, size, epoch, 0))
        region, key = self.peer.region + destination, self.peer.region_key
        pieces = [(source + at, end - at, region + at, key) for at, end in itertools.pairwise(bounds)]
        pieces.append((staged, NOTE.size, self.peer.host + self.peer.landing(flag), self.peer.host_key))
        self._random.shuffle(pieces)
        for piece in pieces:
            number = self._random.randrange(len(self.links))
            self._await_credit(number)
            self.links[number].write(*piece, immediate=len(pieces) << SLOT_BITS | flag)

    def _await_credit(self, number: int) -> None:
        link, line = self.links[number], (PEER * len(self.links) + number) * LINE_BYTES
        started_s = time.monotonic()
        while link.immediates - self.memory.word(self.memory.host + line + CREDIT) >= self.peer.receive_depth:
            self.progress()
            assert time.monotonic() - started_s < LIMIT_S, "no credit for receives"

    def progress(self) -> None:
        super().progress()
        for number, link in enumerate(self.links):
            taken = link.take()
            for immediate in taken:
                self._count(immediate & ((1 << SLOT_BITS) - 1), immediate >> SLOT_BITS)
            if taken:
                self._tell(number, link)

    def _count(self, flag: int, pieces: int) -> None:
        self._seen[flag] = self._seen.get(flag, 0) + 1
        if self._seen[flag] < pieces:
            return
        del self._seen[flag]
        note = self.memory.get(self.memory.host + self.peer.landing(flag), NOTE.size)
        self.memory.put(4 * flag, struct.pack("<I", NOTE.unpack(note)[2]))

    def _tell(self, number: int, link: Link) -> None:
        """How many receives have been posted again; the writes of one link arrive in order."""
        line = (RANK * len(self.links) + number) * LINE_BYTES
        self.memory.put(self.memory.host + line + 8, struct.pack("<I", link.reposted))  # our own word for it
        link.write(self.memory.host + line + 8, 4, self.peer.host + line + CREDIT, self.peer.host_key)


class Rank:
    """The exchange as tests/rdma/stream.cc has it, of rank 1."""

    def __init__(self, plan: Plan, channel: Channel) -> None:
        self.plan = plan
        self.peer = peer = Peer.parse(channel.receive())
        context = Context(name=DEVICE)
        domain = PD(context)
        self.memory = Memory(domain, plan, peer.host_bytes)
        self.links = [Link(context, domain, self.memory) for _ in peer.queues]
        gid = context.query_gid(PORT, 1)  # RoCE version 2 with an IPv4 address: in this machine the second entry
        channel.send(self._endpoint(gid))
        for link, number in zip(self.links, peer.queues, strict=True):
            link.join(peer, 1, number)
        self.notifier = (CountingNotifier if peer.counts else Notifier)(peer, self.memory, self.links)
        self.sent = self.received = self.read = 0

    def _endpoint(self, gid: GID) -> bytes:
        magic, version, _, *alike = self.peer.header
        raw, key, base = bytes.fromhex(str(gid).replace(":", "")), self.memory.registered.rkey, self.memory.base
        numbers = [link.queue.qp_num for link in self.links]
        own = (raw, 0, self.peer.mtu, int(self.peer.counts), len(numbers), base, 0, base + self.memory.host)
        limits = (key, key, 2 * self.plan.slots, RECEIVES, self.peer.host_bytes)
        queues = numbers + [0] * (64 - len(numbers))
        return HEADER.pack(magic, version, RANK, *alike) + ENDPOINT.pack(*own, *limits, *queues)

    def run(self) -> None:
        moved_s = time.monotonic()
        while self.sent < self.plan.messages or self.received < self.plan.messages:
            if self._send() | self._receive():
                moved_s = time.monotonic()
            else:
                time.sleep(NAP_S)  # the only processor is the other rank's, too
            self.notifier.progress()
            assert time.monotonic() - moved_s < LIMIT_S, f"{self.sent} sent, {self.received} received, then nothing"
        for link in self.links:
            link.drain()

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
        destination = plan.receive + slot * plan.slot_bytes + message.destination
        self.memory.put(source, message.data)
        self.notifier.send(source, destination, len(message.data), slot, plan.epoch(self.sent))
        self.sent += 1
        return True

    def _receive(self) -> bool:
        plan, number = self.plan, self.received
        slot = number % plan.slots
        if number == plan.messages or not self._has(slot, plan.epoch(number)):
            return False
        message, at = plan.message(PEER, number), plan.receive + slot * plan.slot_bytes
        assert self.memory.get(at, plan.slot_bytes) == plan.slot_with(message), f"message {number}: wrong bytes"
        self._compare_source(slot, message, number)
        self.memory.put(at, bytes([POISON]) * plan.slot_bytes)
        self.received += 1
        if self.received % GROUP == 0:
            self.notifier.send(0, 0, 0, plan.slots + slot // GROUP, plan.epoch(number))
        return True

    def _compare_source(self, slot: int, message: Message, number: int) -> None:
        """Until the credit the message still lies in the sender's memory."""
        source = self.peer.region + self.plan.send + slot * self.plan.slot_bytes + message.source
        self.links[0].read(self.memory.scratch, len(message.data), source, self.peer.region_key)
        assert self.memory.get(self.memory.scratch, len(message.data)) == message.data, f"message {number}: wrong read"
        self.read += 1

    def say_goodbye(self) -> None:
        """The word for it in each of our links' lines in the peer's memory."""
        self.memory.put(self.memory.staged, struct.pack("<I", 1))
        for number, link in enumerate(self.links):
            line = self.peer.host + (RANK * len(self.links) + number) * LINE_BYTES
            link.write(self.memory.staged, 4, line + GOODBYE, self.peer.host_key)
            link.drain()


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
