"""What planning needs of other ranks: one says something and all hear it, or all say something and all hear all.

Through the group's store, with a deadline: no device, no collective, and a rank that never comes is named.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from mkcompile.errors import MkcompileError

_POLL_S = 0.02


class AbsentRankError(MkcompileError, TimeoutError):
    """A rank did not say what the others waited for; the message names it."""


class Store(Protocol):
    """The part of `torch.distributed.Store` that is used here."""

    def set(self, key: str, value: str, /) -> object: ...
    def get(self, key: str, /) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This rank among the others. Give each use of one store a `name` of its own.

    Units: `timeout_s` seconds, the longest wait for another rank.
    """

    rank: int = 0
    world_size: int = 1
    store: Store | None = None
    timeout_s: float = 300.0
    name: str = "mkcompile/plan"

    def __post_init__(self) -> None:
        if self.world_size > 1 and self.store is None:
            raise ValueError(f"{self.world_size} ranks need a store")

    def share(self, key: str, text: str) -> str:
        """Rank 0's text, on every rank. Raises: AbsentRankError."""
        if self.store is None or self.world_size == 1:
            return text
        if self.rank == 0:
            self.store.set(f"{self.name}/{key}", text)
            return text
        return self._read(f"{self.name}/{key}", 0, time.monotonic() + self.timeout_s)

    def say(self, key: str, text: str) -> None:
        """This rank's part of a later `hear`."""
        if self.store is not None:
            self.store.set(f"{self.name}/{key}/{self.rank}", text)

    def hear(self, key: str, own: str) -> list[str]:
        """What all ranks said under the key, in rank order. Raises: AbsentRankError."""
        if self.store is None or self.world_size == 1:
            return [own]
        deadline = time.monotonic() + self.timeout_s
        others = range(self.world_size)
        return [own if r == self.rank else self._read(f"{self.name}/{key}/{r}", r, deadline) for r in others]

    def exchange(self, key: str, text: str) -> list[str]:
        """Say and hear. Raises: AbsentRankError."""
        self.say(key, text)
        return self.hear(key, text)

    def _read(self, key: str, rank: int, deadline: float) -> str:
        assert self.store is not None
        left_s = max(deadline - time.monotonic(), _POLL_S)
        try:
            self.store.wait([key], timedelta(seconds=left_s))
        except RuntimeError as error:
            # stores have no common error for "too late"; whatever comes earlier is another failure
            if time.monotonic() < deadline - _POLL_S:
                raise
            message = f"rank {self.rank} waited {self.timeout_s:g} s for rank {rank} to publish {key!r}"
            raise AbsentRankError(f"{message}; that rank has failed or is far behind") from error
        return self.store.get(key).decode()


def same(texts: Sequence[str]) -> bool:
    """Did all ranks say the same?"""
    return len(set(texts)) == 1
