"""From what the library reports to a typed exception."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from mkcompile.errors import (
    NoDeviceError,
    PeerLostError,
    RegistrationError,
    RingFullError,
    TransportError,
    TransportReport,
)
from mkcompile.runtime.proxy import abi

# A connection that times out tells the last word of routing where it has one: no route to the network, or it is down.
_UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN}
_GONE = {errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN, errno.ETIMEDOUT, errno.ECONNREFUSED, *_UNREACHABLE}
_NO_DEVICE = {errno.ENODEV, errno.ENOTSUP, errno.ENOSYS}
_REGISTERING = ("ibv_reg_mr", "ibv_reg_dmabuf_mr", "register_memory", "bounce buffer")


def report_of(error: abi.Error, ranks: Sequence[int]) -> TransportReport:
    """The same in Python's types; `ranks` are the group's as numbered in the whole job."""
    return TransportReport(
        call=error.call.decode(errors="replace"),
        device=error.device.decode(errors="replace"),
        peer=ranks[error.peer] if 0 <= error.peer < len(ranks) else error.peer,
        errno=error.number,
        detail=error.detail.decode(errors="replace"),
    )


def exception_of(error: abi.Error, ranks: Sequence[int] = ()) -> TransportError:
    """The exception for a failure."""
    report = report_of(error, ranks)
    if report.call in _REGISTERING:
        return RegistrationError(report)
    if report.peer >= 0 and report.errno in _GONE:
        return PeerLostError(report)
    if report.errno in _NO_DEVICE:
        return NoDeviceError(report)
    return TransportError(report)


def ring_full(capacity: int, device: str) -> RingFullError:
    """No slot of the ring came free before the deadline."""
    detail = f"all {capacity} slots are taken"
    return RingFullError(TransportReport(call="push", device=device, peer=-1, errno=errno.ETIMEDOUT, detail=detail))
