"""One order of launches: each fused launch of a device starts after the one before it in host order has ended.

Ranks that start two fused kernels in different order wait for each other for ever: a cooperative launch that does not
fit starts no block. Host order is the same on all ranks; streams and groups don't matter then.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

# Captures that may be under way at once; events are kept for so many.
_MAX_CAPTURES = 16


class StreamOperations(Protocol):
    """What the chain asks of the driver. Streams and events are raw handles."""

    def create_event(self) -> int: ...
    def record_event(self, event: int, stream: int) -> None: ...
    def wait_event(self, stream: int, event: int) -> None: ...
    def capture_id(self, stream: int) -> int:
        """Which capture the stream is part of; 0 for none."""
        ...


@dataclass(slots=True)
class _Link:
    event: int
    stream: int


class LaunchChain:
    """The chain of one device. Not thread-safe: the launcher holds its `lock` from `enter` to `leave`.

    Launches on one stream are in order already, so only a change of the stream costs a wait, and as long as there is
    one stream no event is recorded (1.5 us of host time). At the first change the other stream waits for all that the
    first was given; from then on each launch has an event, which stands for it alone. A captured launch can't wait for
    an eager one, nor the other way round: each capture is a chain of its own, and whoever replays a graph orders it
    against other work.
    """

    def __init__(self, streams: StreamOperations) -> None:
        self.lock = threading.Lock()
        self.streams = streams
        self._capture_id = streams.capture_id
        # The stream of all eager launches so far; 0 is a stream too.
        self._only: int | None = None
        self._eager: _Link | None = None
        #: False as long as eager launches need no `leave`.
        self.has_events = False
        # By capture, the newest ones: several threads may capture at once.
        self._captured: dict[int, _Link] = {}

    def enter(self, stream: int) -> int:
        """Before a launch: the stream waits for the last one. Returns the capture that the launch is part of, or 0."""
        capture = self._capture_id(stream)
        if not capture and self._eager is None:
            if stream == self._only or self._only is None:
                self._only = stream
                return 0
            self._eager, self.has_events = _Link(self.streams.create_event(), self._only), True
            self.streams.record_event(self._eager.event, self._only)
        last = self._last(capture) if capture else self._eager
        if last is not None and last.stream != stream:
            self.streams.wait_event(stream, last.event)
        return capture

    def leave(self, stream: int, capture: int) -> None:
        """After the launch."""
        link = self._last(capture) if capture else self._eager
        if link is None:
            if not capture:
                return
            link = self._captured[capture] = _Link(self._event_of_a_capture(), stream)
        self.streams.record_event(link.event, stream)
        link.stream = stream

    @contextmanager
    def left(self, stream: int) -> Iterator[None]:
        """Without the lock, for whoever has entered with the stream and has to wait for other ranks first: another
        thread may be with another group, whose ranks may have come in another order. What is launched meanwhile comes
        before; whatever else the lock guards may be another afterwards.
        """
        self.lock.release()
        try:
            yield
        finally:
            self.lock.acquire()
            self.enter(stream)

    def _last(self, capture: int) -> _Link | None:
        return self._captured.get(capture)

    def _event_of_a_capture(self) -> int:
        """A new one, or that of a capture of long ago: waits for it are part of the graph that it was recorded in."""
        if len(self._captured) < _MAX_CAPTURES:
            return self.streams.create_event()
        return self._captured.pop(next(iter(self._captured))).event
