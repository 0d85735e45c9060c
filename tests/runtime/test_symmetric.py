"""Handshakes of one process that can't be with two groups at once: in which order their locks are taken. No store."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import cast

import pytest

from mkcompile.errors import WorkspaceError
from mkcompile.runtime.exchange import Exchange
from mkcompile.runtime.symmetric import SymmetricBuffer, make_buffer
from tests.runtime.fakes import FakeBacking


@dataclass
class Three:
    """The first rank of a group of three, which the job knows as 5, 2 and 9. `busy`: who can't get its lock."""

    busy: int = -1
    rank: int = 0
    world_size: int = 3
    ranks: tuple[int, ...] = (5, 2, 9)
    timeout_s: float = 0.01
    lock: threading.Lock = field(default_factory=threading.Lock)
    log: list[str] = field(default_factory=list)
    agree, raise_failures = Exchange.agree, Exchange.raise_failures

    def gather(self, step: str, value: str) -> tuple[str, ...]:
        self.log.append(step.rpartition(": ")[2] + (", locked" if self.lock.locked() else ""))
        others = ["in use" if rank == self.busy and f"turn of rank {rank}" in step else "" for rank in (2, 9)]
        return value, *others


def made(group: Three) -> SymmetricBuffer:
    return make_buffer(cast(Exchange, group), FakeBacking(3, handshakes=group.lock), "memory", 1024, 512)


def test_locks_are_taken_in_the_order_of_the_jobs_ranks() -> None:
    """The same in all groups, so that no two can each hold what the other waits for."""
    group = Three()
    made(group)
    assert group.log == [
        "come", "allocated", "turn of rank 2", "turn of rank 5, locked", "turn of rank 9, locked", "connected"
    ]  # fmt: skip
    assert not group.lock.locked()


@pytest.mark.parametrize("busy", [2, 5, 9])
def test_a_rank_whose_lock_is_not_free_in_time_is_heard_of_by_all(busy: int) -> None:
    group = Three(busy=busy)
    if busy == 5:
        group.lock.acquire()
    with pytest.raises(WorkspaceError, match=f"rank {busy}: "):
        made(group)
    assert group.lock.locked() == (busy == 5), "its holder's"


class BusyLock:
    """Of another group that is in its handshake."""

    waited_s = 0.0

    def acquire(self, timeout: float) -> bool:
        self.waited_s = timeout
        return False

    def locked(self) -> bool:
        return True


def test_a_lock_is_waited_for_for_less_time_than_the_other_ranks_wait_for_its_rank() -> None:
    lock = BusyLock()
    with pytest.raises(WorkspaceError, match="rank 5: the handshake of another group does not end"):
        made(Three(timeout_s=8.0, lock=cast(threading.Lock, lock)))
    assert lock.waited_s == 4.0


def test_memory_whose_handshake_is_the_groups_own_takes_no_turns() -> None:
    group = Three()
    make_buffer(cast(Exchange, group), FakeBacking(3, handshakes=None), "memory", 1024, 512)
    assert group.log == ["come", "allocated", "connected"]
