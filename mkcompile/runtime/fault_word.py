"""One launch report in host memory, for programs that drive kernels without the operators: tests and benchmarks."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from mkcompile.errors import LaunchOrderError, MkcompileError, PeerTimeoutError, WaitReport
from mkcompile.runtime import abi, driver


@dataclass(frozen=True, slots=True)
class FaultWord:
    """A report in host memory that kernels of one workspace write and Python reads without touching the GPU."""

    address: int

    @staticmethod
    def allocate(device_idx: int) -> FaultWord:
        """A new, empty report that `device_idx` and all other devices can write."""
        return FaultWord(driver.allocate_mapped(ctypes.sizeof(abi.FaultReport), device_idx))

    def clear(self) -> None:
        """Forget the report, for a workspace that has been made anew."""
        ctypes.memset(self.address, 0, ctypes.sizeof(abi.FaultReport))

    def describe(self) -> str:
        """All fields as they stand, for a person to read."""
        report = abi.FaultReport.from_address(self.address)
        return ", ".join(f"{name[0]}={getattr(report, name[0])}" for name in abi.FaultReport._fields_)

    def check(self) -> None:
        """Raise what the device reported, if it did.

        Raises: PeerTimeoutError, LaunchOrderError, MkcompileError.
        """
        report = abi.FaultReport.from_address(self.address)
        if report.code != abi.NO_FAULT:
            raise to_error(report)


def to_error(report: abi.FaultReport) -> MkcompileError:
    """The exception for a report, with ranks as the launch numbered them."""
    operator, role = abi.OPERATORS[report.op], abi.ROLES[report.role]
    if report.code == abi.PEER_TIMEOUT:
        return PeerTimeoutError(
            WaitReport(
                operator=operator,
                rank=report.rank,
                peer=report.peer,
                role=role,
                tile=report.tile,
                expected=report.expected,
                seen=report.seen,
                waited_s=report.waited_ns / 1e9,
            )
        )
    if report.code == abi.LAUNCH_ORDER:
        return LaunchOrderError(
            f"{operator}: rank {report.rank} launched on a workspace that another launch was still using (block "
            f"{report.block} was number {report.seen} of {report.expected})"
        )
    return MkcompileError(
        f"a fused kernel stalled in its {role} role (block {report.block}, detail {report.seen:#x}); this is a "
        f"defect of mkcompile, please report it"
    )
