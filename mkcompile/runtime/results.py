"""Results in symmetric memory, into which peers store finished tiles: where they lie, and when their place is free.

Every rank places its results by the same calls in the same order, so they lie at the same offsets on all ranks; the
launches' identities hold the offset, so that ranks which have come apart get an error and never each other's tiles.
A place is free when the tensor's storage is gone. Where there is no room all ranks take the staged kernel.

A peer stores into a result only after this rank's partial of the same launch has come to it: the launch has started in
its stream, behind everything that read what lay in the place before, if that was in the same stream. The stream of a
new owner therefore waits for the streams of the places that have become free.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from torch import Tensor

from mkcompile.errors import UnsupportedDeviceError, WorkspaceError
from mkcompile.runtime.chain import LaunchChain
from mkcompile.runtime.exchange import Exchange
from mkcompile.runtime.external import Blueprint, free_watch, is_expired, watch
from mkcompile.runtime.symmetric import Backing, SymmetricBuffer, make_buffer

_LOG = logging.getLogger(__name__)
_ALIGNMENT_BYTES = 1024
_SMALLEST_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A result, and its address on every rank. Units: `offset` bytes from the start of the group's results."""

    tensor: Tensor
    outs: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class _Place:
    """Bytes [start, end) of an area in use; `watched` is 0 where they belong to a captured graph, for ever."""

    start: int
    end: int
    stream: int = 0
    watched: int = 0


@dataclass(slots=True)
class _Area:
    """Bytes [start, end) of a chunk and the places in them, in order. What is free there is free for `stream`."""

    chunk: _Chunk
    start: int
    end: int
    stream: int
    places: list[_Place] = field(default_factory=list)

    def gap(self, size_bytes: int) -> tuple[int, int] | None:
        """The first gap that is large enough: where it starts, and the number of places before it."""
        at = self.start
        for i, place in enumerate(self.places):
            if place.start - at >= size_bytes:
                return at, i
            at = place.end
        return (at, len(self.places)) if self.end - at >= size_bytes else None


@dataclass(slots=True, eq=False)
class _Chunk:
    """One block of symmetric memory. Units: `offset` bytes of the chunks before it."""

    buffer: SymmetricBuffer
    offset: int


class Results:
    """The results of one workspace's launches. Not thread-safe: the launcher holds the lock of the device's chain."""

    def __init__(self, exchange: Exchange, backing: Backing, chain: LaunchChain, limit_bytes: int) -> None:
        """Units: `limit_bytes` bytes in all."""
        self._exchange, self._backing, self._chain, self._streams = exchange, backing, chain, chain.streams
        self._limit_bytes = limit_bytes
        self._areas: list[_Area] = []
        self._capture = 0
        self._captured: list[_Area] = []
        self._event = 0
        self.held_bytes = 0

    def take(self, blueprint: Blueprint, stream: int, capture: int) -> Result | None:
        """A place for a launch in this stream, or None where there is no room: the same on every rank.

        Collective where memory is added, which no capture does; the chain is left meanwhile, so that the workspace may
        be another one afterwards.
        Raises: PeerTimeoutError for ranks that do not come.
        """
        size_bytes = -(-blueprint.size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        areas = self._of_capture(capture) if capture else self._areas
        for area in areas:
            self._make_free(area, stream)
            found = area.gap(size_bytes)
            if found is not None:
                return self._put(area, found, blueprint, size_bytes, stream)
        added = self._carve(size_bytes, stream) if capture else self._grow(size_bytes, stream)
        if added is None:
            return None
        return self._put(added, (added.start, 0), blueprint, size_bytes, stream)

    def let_go(self) -> bool:
        """Of all memory, where no tensor is left in it and no graph that was captured uses it."""
        places = [place for area in self._areas for place in area.places]
        if not all(place.watched and is_expired(place.watched) for place in places):
            return False
        for place in places:
            free_watch(place.watched)
        self._areas.clear()
        self.held_bytes = 0
        return True

    def _of_capture(self, capture: int) -> list[_Area]:
        """The areas of the capture that is going on; those of earlier ones stay theirs."""
        if capture != self._capture:
            self._capture, self._captured = capture, []
        return self._captured

    def _make_free(self, area: _Area, stream: int) -> None:
        """Forget dead places; from here on what is free is free for this stream."""
        if area.stream != stream:
            self._follow(area.stream, stream)
            area.stream = stream
        if not any(place.watched and is_expired(place.watched) for place in area.places):
            return
        living = []
        for place in area.places:
            if place.watched and is_expired(place.watched):
                free_watch(place.watched)
                if place.stream != stream:
                    self._follow(place.stream, stream)
            else:
                living.append(place)
        area.places = living

    def _follow(self, stream: int, follower: int) -> None:
        """What is enqueued from now on waits for what the other stream has been given so far."""
        if not self._event:
            self._event = self._streams.create_event()
        self._streams.record_event(self._event, stream)
        self._streams.wait_event(follower, self._event)

    def _put(self, area: _Area, gap: tuple[int, int], blueprint: Blueprint, size_bytes: int, stream: int) -> Result:
        (start, index), buffer = gap, area.chunk.buffer
        outs = tuple(address + start for address in buffer.addresses)
        tensor = blueprint.at(outs[self._exchange.rank])
        area.places.insert(index, _Place(start, start + size_bytes, stream, watch(tensor)))
        return Result(tensor=tensor, outs=outs, offset=area.chunk.offset + start)

    def _carve(self, size_bytes: int, stream: int) -> _Area | None:
        """An area for the capture that is going on, out of what is free for eager launches, which never get it back.

        Whoever replays the graph orders it against them, so no stream waits. Places whose readers were in another
        stream than their area's are left for an eager launch to free.
        """
        for area in self._areas:
            for place in [one for one in area.places if one.watched and one.stream == area.stream]:
                if is_expired(place.watched):
                    free_watch(place.watched)
                    area.places.remove(place)
            found = area.gap(size_bytes)
            if found is not None:
                start, index = found
                area.places.insert(index, _Place(start, start + size_bytes))
                self._captured.append(_Area(area.chunk, start, start + size_bytes, stream))
                return self._captured[-1]
        return None

    def _grow(self, size_bytes: int, stream: int) -> _Area | None:
        """A new chunk, as large as two such results if there is room. Collective."""
        if self._next_bytes(size_bytes) < size_bytes:
            return None
        with self._chain.left(stream), self._exchange.meeting:
            chunk = self._new_chunk(size_bytes)
        if chunk is None:
            return None
        self._areas.append(_Area(chunk, 0, chunk.buffer.size_bytes, stream))
        return self._areas[-1]

    def _next_bytes(self, size_bytes: int) -> int:
        wanted = max(_SMALLEST_BYTES, 2 * size_bytes)
        return min(wanted, self._limit_bytes - self.held_bytes) // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES

    def _new_chunk(self, size_bytes: int) -> _Chunk | None:
        chunk_bytes = self._next_bytes(size_bytes)
        if chunk_bytes < size_bytes:
            return None
        step = f"results of {chunk_bytes} bytes"
        try:
            buffer = make_buffer(self._exchange, self._backing, step, chunk_bytes, 0)
        except (WorkspaceError, UnsupportedDeviceError) as error:  # raised on all ranks alike
            _LOG.warning("group of ranks %s: no %s, results are staged: %s", self._exchange.ranks, step, error)
            self._limit_bytes = self.held_bytes
            return None
        _LOG.info("group of ranks %s: %s", self._exchange.ranks, step)
        chunk = _Chunk(buffer, self.held_bytes)
        self.held_bytes += chunk_bytes
        return chunk
