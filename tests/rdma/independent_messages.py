"""What the ranks of the exchange send each other: tests/host/messages.cc once more, for independent.py."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

POISON, GUARD = 0xEE, 64
ALL_BYTES = 64 << 10
MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Message:
    """Offsets are inside of slots."""

    source: int
    destination: int
    data: bytes


@dataclass(frozen=True)
class Plan:
    """Offsets of a region, and what its messages are. Units: bytes."""

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
        at = next(draws) % ALL_BYTES
        return Message(source=source, destination=destination, data=self.contents[at : at + size])

    @cached_property
    def contents(self) -> bytes:
        """What all messages are parts of."""
        words = [*islice(_draws(0), ALL_BYTES // 8)]
        once = struct.pack(f"<{len(words)}Q", *words)
        return once + once[: self.max_bytes]

    def slot_with(self, message: Message) -> bytes:
        """A receiving slot when the message has come: poison all around."""
        after = self.slot_bytes - message.destination - len(message.data)
        return b"".join((bytes([POISON]) * message.destination, message.data, bytes([POISON]) * after))


def _draws(state: int) -> Iterator[int]:
    while True:
        state = (state + 0x9E3779B97F4A7C15) & MASK
        mixed = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & MASK
        yield mixed ^ (mixed >> 31)
