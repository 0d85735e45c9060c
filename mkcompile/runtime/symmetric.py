"""Symmetric memory of a group: one block of equal size on each rank, mapped by all of them.

Made by torch's symmetric memory. Its handshake has no deadline of its own, so the ranks first tell each other through
the store that they have come, and that they could allocate; only then do they enter it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import _SymmetricMemory

from mkcompile.errors import UnsupportedDeviceError, WorkspaceError
from mkcompile.runtime.exchange import Exchange

_Result = TypeVar("_Result")
#: How errors about it begin.
ABOUT = "symmetric memory"


def _nothing() -> None:
    """There is nothing to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SymmetricBuffer:
    """A block of memory and where every rank's copy of it is mapped on this device.

    `keep` are the objects that own the memory and the mappings. `multicast` is 0 where the fabric has none. `unmap`
    ends the mappings of other ranks' memory, where that must come before its owner frees it.
    """

    addresses: tuple[int, ...]
    size_bytes: int
    multicast: int = 0
    keep: tuple[Any, ...] = ()
    unmap: Callable[[], None] = _nothing


class Backing(Protocol):
    """Where symmetric memory comes from. `handshakes`: held by the process during `connect` where that is for one group
    at a time, else None.
    """

    @property
    def handshakes(self) -> threading.Lock | None: ...

    def allocate(self, size_bytes: int, zeroed_bytes: int) -> Any:
        """Memory of this rank, its first bytes zero. Raises: WorkspaceError."""
        ...

    def connect(self, memory: Any) -> SymmetricBuffer:
        """Exchange the mappings; collective. Raises: UnsupportedDeviceError."""
        ...

    def settle(self) -> None:
        """Wait until the device has done all that it was given, so that memory can go."""
        ...


class TorchBacking:
    """Torch's symmetric memory on one device. Its handshakes are numbered by the process, whatever the group, and meet
    at a socket of the process: all ranks of a group must be in the same one.
    """

    def __init__(self, device: torch.device, group: str, handshakes: threading.Lock) -> None:
        self._device = device
        self._group = group
        self.handshakes: threading.Lock | None = handshakes

    def allocate(self, size_bytes: int, zeroed_bytes: int) -> torch.Tensor:
        """Raises: WorkspaceError."""
        return _in_a_thread(lambda: self._allocate(size_bytes, zeroed_bytes))

    def connect(self, memory: torch.Tensor) -> SymmetricBuffer:
        """Raises: UnsupportedDeviceError."""
        return _in_a_thread(lambda: self._connect(memory))

    def settle(self) -> None:
        """Torch does the same when it unmaps; here it is in sight."""
        torch.cuda.synchronize(self._device)

    def _allocate(self, size_bytes: int, zeroed_bytes: int) -> torch.Tensor:
        # A stream of its own: torch synchronises the current one, whose work may wait for a peer that waits for us.
        # empty_strided_p2p instead of symm_mem.empty: that takes part of a pool, at offsets that can differ by rank.
        with torch.cuda.device(self._device), torch.cuda.stream(_new_stream(self._device)):
            try:
                memory = _SymmetricMemory.empty_strided_p2p((size_bytes,), (1,), torch.uint8, self._device)
            except RuntimeError as error:
                raise WorkspaceError(f"no {size_bytes >> 20} MiB of symmetric memory: {_first_line(error)}") from error
            memory[:zeroed_bytes].zero_()
            torch.cuda.current_stream().synchronize()
        return memory

    def _connect(self, memory: torch.Tensor) -> SymmetricBuffer:
        with torch.cuda.device(self._device), torch.cuda.stream(_new_stream(self._device)):
            try:
                handle = symm_mem.rendezvous(memory, self._group)  # type: ignore[arg-type]
            except RuntimeError as error:
                raise UnsupportedDeviceError(_first_line(error)) from error
        # the tensor's own place in the block, the same on every rank
        offset_bytes = memory.data_ptr() - handle.buffer_ptrs[handle.rank]
        return SymmetricBuffer(
            addresses=tuple(address + offset_bytes if address else 0 for address in handle.buffer_ptrs),
            size_bytes=memory.numel(),
            multicast=handle.multicast_ptr,
            keep=(handle, memory),
        )


@dataclass(frozen=True, slots=True)
class BehindOthers:
    """Another backing, whose driver is asked for memory when `let_end` has returned: kernels may wait for somebody whom
    that would hold up. Source: docs/decisions/404-queues-of-the-device.md.
    """

    backing: Backing
    let_end: Callable[[], None]

    @property
    def handshakes(self) -> threading.Lock | None:
        """As the other one."""
        return self.backing.handshakes

    def allocate(self, size_bytes: int, zeroed_bytes: int) -> Any:
        """Raises: WorkspaceError."""
        self.let_end()
        return self.backing.allocate(size_bytes, zeroed_bytes)

    def connect(self, memory: Any) -> SymmetricBuffer:
        """Raises: UnsupportedDeviceError."""
        return self.backing.connect(memory)

    def settle(self) -> None:
        """As the other one."""
        self.backing.settle()


def make_buffer(
    exchange: Exchange, backing: Backing, step: str, size_bytes: int, zeroed_bytes: int, reached: Sequence[int] = ()
) -> SymmetricBuffer:
    """A new block on every rank; collective. Either all ranks return one or all raise. `reached`: the ranks whose
    memory this one has to see; all by default.

    Raises: PeerTimeoutError for ranks that do not come; WorkspaceError where one can't allocate;
    UnsupportedDeviceError where one can't map another's memory.
    """
    exchange.gather(f"{step}: come", "")
    memory, failure = None, ""
    try:
        memory = backing.allocate(size_bytes, zeroed_bytes)
    except WorkspaceError as error:
        failure = str(error)
    exchange.agree(f"{step}: allocated", failure, WorkspaceError, ABOUT)
    buffer = None
    with _in_turn(exchange, backing.handshakes, step):
        try:
            buffer = backing.connect(memory)
            failure = _unmapped(exchange, buffer, reached or range(exchange.world_size))
        except UnsupportedDeviceError as error:
            failure = str(error)
    exchange.agree(f"{step}: connected", failure, UnsupportedDeviceError, ABOUT)
    assert buffer is not None
    return buffer


@contextmanager
def _in_turn(exchange: Exchange, lock: threading.Lock | None, step: str) -> Iterator[None]:
    """The lock of every rank's process, taken one after the other as the job numbers the ranks: two groups that come
    at once in different order never wait for each other. The wait for a lock is half as long as the others' wait for
    this rank, so that they hear of it and do not take the rank for absent.

    Raises: PeerTimeoutError; WorkspaceError, on all ranks, where one can't get its lock in time.
    """
    is_held = False
    try:
        for rank in sorted(range(exchange.world_size), key=exchange.ranks.__getitem__) if lock is not None else ():
            if lock is not None and rank == exchange.rank:
                is_held = lock.acquire(timeout=exchange.timeout_s / 2)
            failure = "" if is_held or rank != exchange.rank else "the handshake of another group does not end"
            exchange.agree(f"{step}: turn of rank {exchange.ranks[rank]}", failure, WorkspaceError, ABOUT)
        yield
    finally:
        if lock is not None and is_held:
            lock.release()


def _unmapped(exchange: Exchange, buffer: SymmetricBuffer, reached: Sequence[int]) -> str:
    """Which ranks' memory this rank does not see; empty if it sees all that it has to."""
    if len(buffer.addresses) != exchange.world_size:
        return f"{len(buffer.addresses)} mappings for {exchange.world_size} ranks"
    missing = [str(exchange.ranks[rank]) for rank in reached if not buffer.addresses[rank]]
    return f"no mapping of the memory of rank {', '.join(missing)}" if missing else ""


def _in_a_thread(work: Callable[[], _Result]) -> _Result:
    """Run where no CUDA graph's memory pool is in force: a pool holds for the thread that set it.

    Torch's handshake keeps two small tensors. Taken from a pool they would be seen as leaks of the graph:
    "Detected 2 tensor(s) in the cudagraph pool not tracked as outputs".
    """
    with ThreadPoolExecutor(max_workers=1) as threads:
        return threads.submit(work).result()


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
