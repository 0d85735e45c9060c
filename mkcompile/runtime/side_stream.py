"""Streams of ours that run beside a caller's from one point to another, so that all of it can be captured together."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

from mkcompile.runtime import driver
from mkcompile.runtime.chain import StreamOperations

_HIGHEST_PRIORITY = -5
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


@dataclass(frozen=True, slots=True)
class SideStream:
    """A stream, and the events where it parts from a caller's stream and where that waits for it. Raw handles."""

    handle: int
    begun: int
    ended: int


class SideStreams:
    """Of one device: one for eager launches, and one for each capture that is under way, since a stream that is part of
    one can't do other work meanwhile. Not for two threads at once.
    """

    def __init__(self, streams: StreamOperations, create: Callable[[], int]) -> None:
        """`create`: a new stream. The first of captures is made here, since a capture comes later."""
        self._streams, self._create = streams, create
        self._eager = self._new()
        self._captured = [self._new()]

    @staticmethod
    def on(device_idx: int, streams: StreamOperations) -> SideStreams:
        """Raises: DriverError."""
        return SideStreams(streams, lambda: _create_stream(device_idx))

    def part(self, stream: int) -> SideStream:
        """What it is given next follows what `stream` was given so far."""
        side = self._beside(stream)
        self._streams.record_event(side.begun, stream)
        self._streams.wait_event(side.handle, side.begun)
        return side

    def end(self, side: SideStream) -> None:
        """What it was given so far is what `join` waits for."""
        self._streams.record_event(side.ended, side.handle)

    def join(self, side: SideStream, stream: int) -> None:
        """What `stream` is given next follows."""
        self._streams.wait_event(stream, side.ended)

    def _beside(self, stream: int) -> SideStream:
        capture = self._streams.capture_id(stream)
        if not capture:
            return self._eager
        for side in self._captured:
            if self._streams.capture_id(side.handle) in (0, capture):  # 0: the capture that it was part of has ended
                return side
        self._captured.append(self._new())
        return self._captured[-1]

    def _new(self) -> SideStream:
        return SideStream(self._create(), self._streams.create_event(), self._streams.create_event())


def _create_stream(device_idx: int) -> int:
    stream = ctypes.c_void_p()
    with driver.PrimaryContext(device_idx):
        code = driver.library().cuStreamCreateWithPriority(ctypes.byref(stream), _NON_BLOCKING, _HIGHEST_PRIORITY)
    driver.check("cuStreamCreateWithPriority", code)
    assert stream.value is not None
    return stream.value
