"""What the ranks of one group tell each other through the group's store: needs no device, has a deadline."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroup
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import _get_process_group_store

from mkcompile.errors import PeerTimeoutError, UnsupportedDeviceError, WaitReport, WorkspaceError


def group_timeout_s(group: ProcessGroup) -> float:
    """The timeout that the group's collectives have; torch's default where its backend does not say. Units: seconds."""
    for device in group._device_types:
        options = group._get_backend(device).options
        if options is not None:
            return options._timeout.total_seconds()
    return default_pg_timeout.total_seconds()


def own_store(group: ProcessGroup, topic: str) -> Store:
    """A place in the group's store that no other part of the program uses, nor an earlier group of the same name, which
    the store can have outlived: each life counts by itself.
    """
    store: Store = PrefixStore(f"mkcompile/{topic}", _get_process_group_store(group))
    return PrefixStore(str(store.add(f"life/{group.rank()}", 1)), store)


def is_alone(group: ProcessGroup) -> bool:
    """Is there nobody to ask? A fake group's other ranks do not exist."""
    return group.size() == 1 or dist.get_backend(group) == "fake"


class Exchange:
    """One group, as this rank sees it, and a place in its store.

    `meeting` is held by the thread that takes several steps: the others take them in one order, too.
    """

    def __init__(self, group: ProcessGroup, topic: str, timeout_s: float = 0.0) -> None:
        """Units: `timeout_s` seconds to wait for the other ranks; 0: the group's own timeout."""
        self.group = weakref.ref(group)
        self.rank = group.rank()
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.timeout_s = timeout_s or group_timeout_s(group)
        self._store = own_store(group, topic)
        self.meeting = threading.RLock()
        self._completed = 0

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return len(self.ranks)

    def gather(self, step: str, value: str) -> tuple[str, ...]:
        """Every rank's value of this step, in rank order. A collective: all ranks call it with equal steps.

        A rank that gives up withdraws what it said, so that one which comes later does not go on alone; when it comes
        again it is at the same number. Ranks that have come apart are at one number again after at most one error.
        Raises: PeerTimeoutError, naming all that did not come in time; WorkspaceError where they came for another step.
        """
        started = time.monotonic()
        keys = [f"{self._completed}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], f"{step}\n{value}")
        try:
            self._store.wait(keys, timedelta(seconds=self.timeout_s))
        except RuntimeError as error:  # a store's timeout, or its host is gone
            raise PeerTimeoutError(self._report(step, self._withdraw(keys), time.monotonic() - started)) from error
        said = [self._store.get(key).decode().split("\n", 1) for key in keys]
        self._completed += 1
        if self._completed > 1:
            # all have said this number, so all have read the one before
            self._store.delete_key(f"{self._completed - 2}/{self.rank}")
        self._check_steps(step, [name for name, _ in said])
        return tuple(text for _, text in said)

    def agree(self, step: str, failure: str, error: type[UnsupportedDeviceError | WorkspaceError], about: str) -> None:
        """Either all ranks go on or none; `failure`: why this one can't, empty if it can. A collective.

        Raises: `error` on all ranks, naming those that can't; as `gather`.
        """
        self.raise_failures(self.gather(step, failure), error, about)

    def raise_failures(
        self, failures: Sequence[str], error: type[UnsupportedDeviceError | WorkspaceError], about: str
    ) -> None:
        """Raises: `error` with what each rank's failure is, where one has any."""
        failed = [f"rank {self.ranks[rank]}: {text}" for rank, text in enumerate(failures) if text]
        if failed:
            raise error(f"{about}: {'; '.join(failed)}")

    def _withdraw(self, keys: list[str]) -> list[int]:
        """Take back what this rank said. Returns the ranks that never came: all others where the store is gone.

        A mark stays, so that ranks which give up one after the other don't take each other for absent.
        """
        try:
            came = [self._store.check([key]) or self._store.check([f"{key}/left"]) for key in keys]
            self._store.set(f"{keys[self.rank]}/left", "")
            self._store.delete_key(keys[self.rank])
        except RuntimeError:
            return [rank for rank in range(self.world_size) if rank != self.rank]
        return [rank for rank, has_come in enumerate(came) if not has_come]

    def _check_steps(self, step: str, steps: list[str]) -> None:
        others = [f"{self.ranks[rank]} for {name!r}" for rank, name in enumerate(steps) if name != step]
        if others:
            raise WorkspaceError(
                f"the ranks met for different things: {self.ranks[self.rank]} for {step!r}, {', '.join(others)}; "
                "after an error on one rank all ranks must go on from the same call"
            )

    def _report(self, step: str, absent: list[int], waited_s: float) -> WaitReport:
        names = [str(self.ranks[rank]) for rank in absent]
        return WaitReport(
            operator=step,
            rank=self.ranks[self.rank],
            peer=self.ranks[absent[0]] if absent else self.ranks[self.rank],
            role=f"the host, which found rank {', '.join(names)} missing" if len(names) > 1 else "the host",
            tile=-1,
            expected=1,
            seen=0,
            waited_s=waited_s,
        )
