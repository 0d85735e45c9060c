"""One order of launches: each fused launch of a device starts after the one before it in host order has ended.

Ranks that start two fused kernels in different order wait for each other for ever: a cooperative launch that does not
fit starts no block. Host order is the same on all ranks; streams and groups don't matter then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


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
    """The chain of one device. Not thread-safe: the launcher holds its lock from `enter` to `leave`.

    Launches on one stream are in order already, so only a change of the stream costs a wait. The event stands for the
    launch alone, not for what the stream is given later. A captured launch can't wait for an eager one, nor the other
    way round: each capture is a chain of its own, and whoever replays a graph orders it against other work.
    """

    def __init__(self, streams: StreamOperations) -> None:
        self._streams = streams
        self._eager: _Link | None = None
        self._captured: tuple[int, _Link] | None = None

    def enter(self, stream: int) -> int:
        """Before a launch: the stream waits for the last one. Returns the capture that the launch is part of, or 0."""
        capture = self._streams.capture_id(stream)
        last = self._last(capture) if capture else self._eager
        if last is not None and last.stream != stream:
            self._streams.wait_event(stream, last.event)
        return capture

    def leave(self, stream: int, capture: int) -> None:
        """After the launch."""
        link = self._last(capture) if capture else self._eager
        if link is None:
            link = _Link(self._streams.create_event(), stream)
            if capture:
                self._captured = (capture, link)
            else:
                self._eager = link
        self._streams.record_event(link.event, stream)
        link.stream = stream

    def _last(self, capture: int) -> _Link | None:
        if self._captured is not None and self._captured[0] == capture:
            return self._captured[1]
        return None
