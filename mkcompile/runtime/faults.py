"""From what a kernel wrote when it gave up to the error that the next operator call raises.

Each workspace has a `FaultReport` in host memory that the device can write. Looking at all of them costs a call less
than a microsecond, so every operator call looks.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mkcompile.errors import (
    KernelFaultError,
    LaunchMismatchError,
    LaunchOrderError,
    MkcompileError,
    PeerGaveUpError,
    PeerTimeoutError,
    ProxyUnavailableError,
    WaitReport,
    WorkspaceError,
)
from mkcompile.runtime import abi
from mkcompile.runtime.identity import LaunchIdentity

# A report has 48 bytes; one cache line each, so that two devices never share one.
_SLOT_BYTES = 64
_WORDS = _SLOT_BYTES // 4
# Launches whose description is kept, for the text of a mismatch.
_MAX_DESCRIBED = 4096
_CAPTURE_ANEW = "Capture graphs of this group anew before you replay them"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Host memory that all devices write at the same address, and that stays where it is."""

    address: int
    size_bytes: int


@dataclass(slots=True, kw_only=True)
class FaultSlot:
    """Where the launches of one workspace report. `ranks`: the group's ranks as numbered in the whole job. Over several
    nodes those of this one, `rails` the rail peer on each, `network_failure` says what has ended the proxy, and
    `network_state` what it has done.

    `failed` is set when a report is raised, and stays: the workspace is of no use any more. `released`: the workspace
    is gone, and a report waits to be raised.
    """

    index: int
    address: int
    ranks: tuple[int, ...]
    rails: tuple[int, ...] = ()
    network_failure: Callable[[], MkcompileError | None] | None = None
    network_state: Callable[[], str] | None = None
    failed: bool = False
    released: bool = False


@dataclass(slots=True)
class FaultBoard:
    """All fault reports of this process."""

    memory: HostMemory
    _described: dict[int, str] = field(init=False, default_factory=dict)
    _words: memoryview = field(init=False)
    _slots: dict[int, FaultSlot] = field(init=False, default_factory=dict)
    _code_words: tuple[int, ...] = field(init=False, default=())
    # groups that meet claim side by side, each under its own lock
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        ctypes.memset(self.memory.address, 0, self.memory.size_bytes)
        words = (ctypes.c_uint32 * (self.memory.size_bytes // 4)).from_address(self.memory.address)
        self._words = memoryview(words).cast("B").cast("I")

    def claim(self, ranks: tuple[int, ...], rails: tuple[int, ...] = ()) -> FaultSlot:
        """An empty report for a new workspace. Raises: WorkspaceError when there are too many."""
        with self._lock:
            used = set(self._slots)
            index = next((i for i in range(self.memory.size_bytes // _SLOT_BYTES) if i not in used), None)
            if index is None:
                raise WorkspaceError(
                    f"{len(used)} workspaces are in use, by groups or captured CUDA graphs; drop some of them"
                )
            slot = FaultSlot(index=index, address=self.memory.address + index * _SLOT_BYTES, ranks=ranks, rails=rails)
            self._slots[index] = slot
            self._watch()
        return slot

    def release(self, slot: FaultSlot) -> None:
        """No launch that could still write the report is left. One that was written since the last look is raised
        before the slot is anybody else's. Idempotent.
        """
        with self._lock:
            if self._slots.get(slot.index) is not slot:
                return
            if self._words[slot.index * _WORDS]:
                slot.released = True
            else:
                self._free(slot)

    def _free(self, slot: FaultSlot) -> None:
        slot.network_failure = slot.network_state = None
        del self._slots[slot.index]
        self._watch()

    def describe(self, identity: LaunchIdentity) -> None:
        """Remember what a launch is, so that an error can say it."""
        if len(self._described) >= _MAX_DESCRIBED:
            self._described.clear()
        self._described[identity.number] = identity.text

    def _watch(self) -> None:
        self._code_words = tuple(index * _WORDS for index in self._slots)

    def check(self) -> None:
        """Raises: what a launch has reported, once: PeerTimeoutError, LaunchMismatchError, LaunchOrderError,
        KernelFaultError; WorkspaceError for a graph that was replayed after any of them.
        """
        words = self._words
        for at in self._code_words:
            if words[at] and (error := self._take(at // _WORDS)) is not None:
                raise error

    def _take(self, index: int) -> MkcompileError | None:
        """The error of a report, which is empty afterwards; None where another thread has just taken it."""
        with self._lock:
            slot = self._slots.get(index)
            if slot is None or not self._words[index * _WORDS]:
                return None
            report = abi.FaultReport.from_buffer_copy(ctypes.string_at(slot.address, ctypes.sizeof(abi.FaultReport)))
            ctypes.memset(slot.address, 0, _SLOT_BYTES)
            slot.failed, network_failure, network_state = True, slot.network_failure, slot.network_state
            if slot.released:
                self._free(slot)
        if report.code == abi.NETWORK_FAULT and network_failure is not None:
            failure = network_failure()
            if failure is not None:
                return failure
        error = error_of(report, slot.ranks, self._described, slot.rails)
        if report.code == abi.PEER_TIMEOUT and network_state is not None:
            error.add_note(network_state())
        return error


def error_of(
    report: abi.FaultReport, ranks: tuple[int, ...], described: Mapping[int, str], rails: tuple[int, ...] = ()
) -> MkcompileError:
    """The typed error of a report; `ranks` are the ranks of the launch as numbered in the whole job, `described` the
    launches that this process knows by identity. Over several nodes `ranks` are those of one, and `rails` the rail peer
    on each.
    """
    operator, rank = _name(abi.OPERATORS, report.op), _rank(ranks, report.rank)
    peers = rails if report.role in abi.NETWORK_ROLES else ranks
    if report.code == abi.LAUNCH_ORDER:
        return LaunchOrderError(
            f"{operator}: on rank {rank} a launch found the workspace of its group in use by another launch that had "
            "not finished. A CUDA graph was replayed beside other work of the same group: replay it on the stream of "
            f"that work, or make one wait for the other. {_CAPTURE_ANEW}"
        )
    if report.code == abi.LAUNCH_MISMATCH:
        return LaunchMismatchError(
            f"rank {rank} and rank {_rank(peers, report.peer)} are not at the same launch: rank {rank} launched "
            f"{_describe(described, report.expected)}; rank {_rank(peers, report.peer)} launched "
            f"{_describe(described, report.seen)}. One of them has skipped a call or made another one"
        )
    if report.code == abi.REPLAY_AFTER_FAULT:
        return WorkspaceError(
            f"{operator}: on rank {rank} a CUDA graph was replayed on a workspace that had failed (code "
            f"{report.seen}): its results have no meaning. {_CAPTURE_ANEW}"
        )
    if report.code == abi.PEER_GAVE_UP:
        return PeerGaveUpError(
            f"{operator}: rank {_rank(peers, report.peer)} gave up a launch; what its copy engine still sent may have "
            f"spoilt the results of rank {rank}"
        )
    if report.code == abi.NETWORK_FAULT:
        return ProxyUnavailableError(
            f"{operator}: on rank {rank} the host proxy stopped while a kernel waited for rank "
            f"{_rank(peers, report.peer)} on another node"
        )
    if report.code == abi.PEER_TIMEOUT:
        return PeerTimeoutError(
            WaitReport(
                operator=operator,
                rank=rank,
                peer=_rank(peers, report.peer),
                role=_name(abi.ROLES, report.role),
                tile=report.tile,
                expected=report.expected,
                seen=report.seen,
                waited_s=report.waited_ns * 1e-9,
            )
        )
    return KernelFaultError(
        f"{operator}: on rank {rank} block {report.block} ({_name(abi.ROLES, report.role)}) failed by itself "
        f"(code {report.code}, detail {report.seen})"
    )


def _describe(described: Mapping[int, str], identity: int) -> str:
    return described.get(identity, f"what this rank has never launched (identity {identity:#010x})")


def _name(names: tuple[str, ...], index: int) -> str:
    return names[index] if index < len(names) else f"number {index}"


def _rank(ranks: tuple[int, ...], rank: int) -> int:
    return ranks[rank] if rank < len(ranks) else rank
