"""Every failure that mkcompile raises on purpose, one class for each thing that a caller can act on."""

from __future__ import annotations

import os
from dataclasses import dataclass


class MkcompileError(Exception):
    """Base of all errors of this package."""


class OptionError(MkcompileError, ValueError):
    """A setting, environment variable or `mkernel.*` option that does not exist or has a bad value."""


class OperatorInputError(MkcompileError, ValueError):
    """An operator was called with arguments that it can't take; raised before anything is launched."""


class GroupError(MkcompileError, ValueError):
    """A process group that does not exist, that this rank is not in, or that has the wrong size."""


class PlanMismatchError(MkcompileError, RuntimeError):
    """Ranks of one group came to the same launch with different plans, or some never came."""


class UnsupportedDeviceError(MkcompileError, RuntimeError):
    """The device, driver or toolchain can't run the fused kernels; the reference path still can."""


class CompileError(MkcompileError, RuntimeError):
    """A kernel source did not compile; the message carries the compiler's log."""


class WorkspaceError(MkcompileError, RuntimeError):
    """A symmetric workspace can't be made or grown: cap reached, or growth during CUDA graph capture."""


class LaunchOrderError(MkcompileError, RuntimeError):
    """A launch found its workspace in use by another launch that has not finished."""


class LaunchMismatchError(MkcompileError, RuntimeError):
    """Two ranks of one group came to the same place in the order of launches with different launches: one has skipped
    a call, or made another one.
    """


class PeerGaveUpError(MkcompileError, RuntimeError):
    """A peer gave up a launch, after which its copy engine may have overwritten rows that this rank still read."""


class KernelFaultError(MkcompileError, RuntimeError):
    """A fused kernel stopped through a fault of its own; the CUDA context is lost. Please report it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitReport:
    """What a bounded wait saw when its deadline passed.

    `rank` and `peer` are numbered as in the whole job. `tile` is -1 where the host waited, before any launch.
    Units: `waited_s` seconds; `expected` and `seen` are epochs of a flag, or of a tile without one its
    parts and how many of them have come; where a rank waited for itself, blocks of its launch.
    """

    operator: str
    rank: int
    peer: int
    role: str
    tile: int
    expected: int
    seen: int
    waited_s: float

    def __str__(self) -> str:
        whom = f"rank {self.peer}" if self.peer != self.rank else "the blocks of its own launch"
        waited = f"{self.operator}: rank {self.rank} ({self.role}) waited {self.waited_s:.1f} s for {whom}"
        if self.tile < 0:
            return f"{waited}, which did not come"
        return f"{waited}, tile {self.tile}: expected {self.expected}, saw {self.seen}"


class PeerTimeoutError(MkcompileError, TimeoutError):
    """A peer did not arrive within the deadline; `report` says who waited for whom and for what."""

    def __init__(self, report: WaitReport) -> None:
        super().__init__(str(report))
        self.report = report


class ProxyUnavailableError(UnsupportedDeviceError):
    """The host proxy, or the transport that was asked for, can't be had on this machine; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportReport:
    """What the network refused, and where.

    `call` is the function that failed, `device` the NIC or interface, `peer` the rank that was meant, numbered as in
    the whole job (-1: none), `errno` the system's number for the reason, `detail` what that number does not say.
    """

    call: str
    device: str
    peer: int
    errno: int
    detail: str

    def __str__(self) -> str:
        where = f" on {self.device}" if self.device else ""
        whom = f", peer {self.peer}" if self.peer >= 0 else ""
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.call}{where}{whom}: {os.strerror(self.errno)} [errno {self.errno}]{detail}"


class TransportError(MkcompileError, RuntimeError):
    """The host proxy has failed, and does nothing any more; the process can go on without it."""

    def __init__(self, report: TransportReport) -> None:
        super().__init__(str(report))
        self.report = report


class PeerLostError(TransportError):
    """A peer's process, machine or link is gone, or did nothing for longer than the deadline."""


class RegistrationError(TransportError):
    """Memory that the NIC can't reach by any way that was tried."""


class NoDeviceError(TransportError):
    """No NIC or interface that the transport can use."""


class RingFullError(TransportError):
    """The command ring stayed full for longer than the deadline: the network takes nothing."""
