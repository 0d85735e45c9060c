"""Where the copy engines of the other ranks write: symmetric memory of a group beside its workspace, made when it is
first needed, and anew when it is too small.

A launch's transfers begin when every rank has entered the launch, so one area serves all launches in turn. Those of a
launch that was given up can't be stopped. They run into the area that it had, which no launch on a new workspace uses,
and which stays mapped on the ranks that write it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from mkcompile.errors import WorkspaceError
from mkcompile.runtime.chain import LaunchChain
from mkcompile.runtime.exchange import Exchange
from mkcompile.runtime.faults import FaultSlot
from mkcompile.runtime.symmetric import Backing, SymmetricBuffer, make_buffer
from mkcompile.runtime.workspace import WARM_UP_FIRST

_LOG = logging.getLogger(__name__)
_SMALLEST_BYTES = 16 << 20


@dataclass(slots=True, kw_only=True)
class GatherArea:
    """The areas of one group. `addresses`: of the one in use, by rank; another tuple for another area.

    Units: `cap_bytes` bytes of the one in use.
    """

    exchange: Exchange
    backing: Backing
    chain: LaunchChain
    cap_bytes: int
    current: SymmetricBuffer | None = None
    addresses: tuple[int, ...] = ()
    _captured: bool = False
    _slot: FaultSlot | None = None
    _kept: list[SymmetricBuffer] = field(default_factory=list)

    @property
    def held_bytes(self) -> int:
        """Bytes on this rank, those kept for captured graphs included."""
        return sum(one.size_bytes for one in [*self._kept, *([self.current] if self.current else [])])

    def require(self, num_bytes: int, stream: int, capturing: bool, slot: FaultSlot) -> tuple[int, ...]:
        """The addresses of at least so many bytes, for a launch on the workspace that reports to `slot`, which has
        entered the chain with the stream. Where a new area is needed that is collective, and the chain is left.

        Raises: WorkspaceError where a new one is needed while a CUDA graph is captured, or can't be had;
        PeerTimeoutError for ranks that do not come; UnsupportedDeviceError.
        """
        while self._lacks(num_bytes, slot):
            if capturing:
                raise WorkspaceError(f"a CUDA graph is being captured and this call needs a new area; {WARM_UP_FIRST}")
            with self.chain.left(stream), self.exchange.meeting:
                if self._lacks(num_bytes, slot):
                    self._replace(num_bytes, slot)
        self._captured, self._slot = self._captured or capturing, slot
        return self.addresses

    def _lacks(self, num_bytes: int, slot: FaultSlot) -> bool:
        return self.current is None or self.current.size_bytes < num_bytes or self._outlived(slot)

    def _outlived(self, slot: FaultSlot) -> bool:
        """Whether transfers of another workspace's launches may come that nobody waits for: given up, or replayed."""
        return self._slot is not None and slot is not self._slot and (self._slot.failed or self._captured)

    def _replace(self, num_bytes: int, slot: FaultSlot) -> None:
        if num_bytes > self.cap_bytes:
            raise WorkspaceError(
                f"shards of {num_bytes} bytes exceed the cap of {self.cap_bytes}; raise MKCOMPILE_ARENA_BYTES"
            )
        size_bytes = min(max(_SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length()), self.cap_bytes)
        step = f"gathered rows of {size_bytes >> 20} MiB"
        new = make_buffer(self.exchange, self.backing, step, size_bytes, 0)
        self._put(new, slot)
        _LOG.info("group of ranks %s: %s", self.exchange.ranks, step)

    def close(self) -> None:
        """Give the area back, unless captured graphs may use it."""
        self._put(None, None)

    def _put(self, new: SymmetricBuffer | None, slot: FaultSlot | None) -> None:
        """In the place of the one before."""
        with self.chain.lock:  # from here on nothing is launched on that
            old, was_captured = self.current, self._captured
            self.current, self.addresses = new, () if new is None else new.addresses
            self._captured, self._slot = False, slot
        if old is None:
            return
        if was_captured:
            self._kept.append(old)
        else:
            # the ranks have come to the same call or the group has ended: what the device still does can end by itself
            self.backing.settle()
