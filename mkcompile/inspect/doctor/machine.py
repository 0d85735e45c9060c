"""The GPUs of this machine, behind an interface that tests can stand in for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch._C._autograd import DeviceType

from mkcompile.runtime.probe import driver_version


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInfo:
    """One GPU. Units: bytes."""

    name: str
    capability: tuple[int, int]
    num_sms: int
    memory_bytes: int


class Machine(Protocol):
    """What the doctor asks about GPUs."""

    def cuda_build(self) -> str | None:
        """The CUDA version that torch was built with, or None."""

    def driver(self) -> str | None:
        """The driver's version, or None where there is none."""

    def gpus(self) -> Sequence[GpuInfo]:
        """All visible GPUs."""

    def peer_access(self, source: int, target: int) -> bool:
        """Can the first load from and store to the second's memory?"""

    def nvlinks(self) -> Sequence[Sequence[int]]:
        """NVLink connections between each pair; empty where it can't be told."""

    def multicast(self) -> bool:
        """Do device and driver offer NVLink multicast?"""


class ThisMachine:
    """The machine that we run on, through torch."""

    def cuda_build(self) -> str | None:
        """torch's CUDA version."""
        return torch.version.cuda

    def driver(self) -> str | None:
        """As the kernel module says it."""
        return driver_version()

    def gpus(self) -> list[GpuInfo]:
        """By torch's order."""
        if not torch.cuda.is_available():
            return []
        properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return [
            GpuInfo(
                name=one.name,
                capability=(one.major, one.minor),
                num_sms=one.multi_processor_count,
                memory_bytes=one.total_memory,
            )
            for one in properties
        ]

    def peer_access(self, source: int, target: int) -> bool:
        """As the driver says."""
        return torch.cuda.can_device_access_peer(source, target)

    def nvlinks(self) -> list[list[int]]:
        """torch's detection by NVML."""
        from torch._C._distributed_c10d import _detect_dma_connectivity  # type: ignore[attr-defined]

        matrix: list[list[int]] = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix
        return matrix

    def multicast(self) -> bool:
        """torch's check of the first GPU."""
        from torch._C._distributed_c10d import _SymmetricMemory

        return bool(_SymmetricMemory.has_multicast_support(DeviceType.CUDA, 0))
