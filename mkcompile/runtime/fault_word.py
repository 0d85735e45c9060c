"""One launch report in host memory, for programs that drive kernels without the operators: tests and benchmarks."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

from mkcompile.runtime import abi, driver
from mkcompile.runtime.faults import error_of


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

    def report(self) -> abi.FaultReport:
        """The report as it stands."""
        return abi.FaultReport.from_address(self.address)

    def describe(self) -> str:
        """All fields as they stand, for a person to read."""
        report = abi.FaultReport.from_address(self.address)
        return ", ".join(f"{name[0]}={getattr(report, name[0])}" for name in abi.FaultReport._fields_)

    def check(self, described: Mapping[int, str] | None = None) -> None:
        """Raise what the device reported, if it did, with ranks as the launch numbered them.

        Raises: as `faults.FaultBoard.check`.
        """
        report = abi.FaultReport.from_address(self.address)
        if report.code != abi.NO_FAULT:
            raise error_of(report, (), described or {})
