"""Ranks compare what they are about to launch, once for each group and plan: a difference is an error, not a hang.

The comparison goes through the group's own store, so it needs no device and no collective. Plans are numbered by each
rank in the order in which it comes to them; number n of one rank is compared with number n of the others. A rank that
skips a launch, or that comes to two new plans in another order, is therefore found.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup

from mkcompile.config import settings
from mkcompile.errors import PlanMismatchError
from mkcompile.ops.groups import find
from mkcompile.runtime.exchange import group_timeout_s, is_alone, own_store

# After one rank is known to differ: how long to look at the others, so that the error can name all that do.
_GRACE_S = 2.0
# The finest wait that all stores can do; file stores look every 10 ms.
_POLL_S = 0.02


@dataclass(slots=True, kw_only=True)
class _GroupState:
    """What this process has agreed on with one group; no `store` where there is nobody else."""

    group: weakref.ref[ProcessGroup]
    store: Store | None
    ranks: tuple[int, ...]
    rank: int
    timeout_s: float
    launches: int = 0
    seen: set[Hashable] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Agreement:
    """All that this process has agreed on, by group."""

    def __init__(self, timeout_s: float | None = None) -> None:
        """Units: `timeout_s` seconds to wait for other ranks; 0: the group's timeout; None: as the settings say."""
        self._timeout_s = timeout_s
        self._states: dict[str, _GroupState] = {}
        self._lock = threading.Lock()

    def holds(self, group: str, signature: Hashable) -> bool:
        """Have the ranks of the group agreed on this launch before? About 1 us; talks to nobody."""
        state = self._states.get(group)
        try:
            return state is not None and signature in state.seen and state.group() is find(group)
        except (RuntimeError, KeyError, ValueError):  # the name is no group's now: the call's check says so
            return False

    def reach(self, group: str, signature: Hashable, plan: str) -> None:
        """Compare `plan` over the ranks of the group and remember `signature`.

        Raises: PlanMismatchError, on each rank that came, with the ranks that differ or that did not come in time.
        """
        with self._lock:
            state = self._state(group)
        with state.lock:
            if signature not in state.seen:
                if state.store is not None:
                    _compare(state, state.store, group, plan)
                state.seen.add(signature)

    def _state(self, name: str) -> _GroupState:
        """The group's state; a new one where the name belongs to another group than before."""
        group = find(name)
        state = self._states.get(name)
        if state is None or state.group() is not group:
            state = self._states[name] = self._new_state(group)
        return state

    def _new_state(self, group: ProcessGroup) -> _GroupState:
        timeout_s = settings().timeout_s if self._timeout_s is None else self._timeout_s
        return _GroupState(
            group=weakref.ref(group),
            store=None if is_alone(group) else own_store(group, "agree"),
            ranks=tuple(dist.get_process_group_ranks(group)),
            rank=group.rank(),
            timeout_s=timeout_s or group_timeout_s(group),
        )


def _compare(state: _GroupState, store: Store, group: str, plan: str) -> None:
    number = state.launches
    state.launches += 1
    store.set(_key(number, state.rank), plan)
    started = time.monotonic()
    deadline = started + state.timeout_s
    others: dict[int, str | None] = {}
    for peer in range(len(state.ranks)):
        if peer == state.rank:
            continue
        others[peer] = _read(store, _key(number, peer), deadline)
        if others[peer] != plan:
            deadline = min(deadline, time.monotonic() + _GRACE_S)
    if any(other != plan for other in others.values()):
        raise PlanMismatchError(_message(state, group, number, plan, others, time.monotonic() - started))
    if number > 0:
        # all have written number n, so all have read number n - 1
        store.delete_key(_key(number - 1, state.rank))


def _key(number: int, rank: int) -> str:
    return f"{number}/{rank}"


def _read(store: Store, key: str, deadline: float) -> str | None:
    """The value, or None if it was not written in time."""
    left_s = max(deadline - time.monotonic(), _POLL_S)
    try:
        store.wait([key], timedelta(seconds=left_s))
    except RuntimeError:
        # stores have no common error for "too late"; whatever comes earlier is another failure
        if time.monotonic() < deadline - _POLL_S:
            raise
        return None
    return store.get(key).decode()


def _message(
    state: _GroupState, group: str, number: int, plan: str, others: dict[int, str | None], waited_s: float
) -> str:
    """Who differs and how; who did not come; what to look at."""
    name = [str(rank) for rank in state.ranks]
    lines = [f"the ranks of group {group!r} do not launch the same thing (new plan number {number} of this group)"]
    lines.append(f"  rank {name[state.rank]} (this one): {plan}")
    lines += [f"  rank {name[peer]}: {other}" for peer, other in others.items() if other not in (None, plan)]
    absent = [name[peer] for peer, other in others.items() if other is None]
    if absent:
        lines.append(f"  rank {', '.join(absent)}: did not come within {waited_s:.1f} s")
    lines.append(
        "compile the same model with the same options and input shapes on every rank; where the code depends on "
        "the rank, keep that part out of the compiled region or set mkernel.fuse='never'"
    )
    return "\n".join(lines)
