"""What this machine can do: every check has what its lack costs and how to get it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch._inductor.runtime.cache_dir_utils import cache_dir

from mkcompile.config import foreign_settings, settings
from mkcompile.inspect.doctor import gpus, network, software, storage, symmetric
from mkcompile.inspect.doctor.check import Check, Diagnosis, Section
from mkcompile.inspect.doctor.machine import Machine, ThisMachine

__all__ = ["Check", "Diagnosis", "Machine", "Section", "examine"]


def examine(machine: Machine | None = None) -> Diagnosis:
    """Check everything; takes seconds, and at most the deadline of the symmetric-memory trial."""
    machine = machine or ThisMachine()
    devices = gpus.section(machine, foreign_settings())
    tried = symmetric.check(len(machine.gpus()))
    return Diagnosis(
        sections=(
            software.section(machine),
            replace(devices, checks=(*devices.checks, tried)),
            network.section(),
            storage.section(settings().cache_dir.expanduser(), Path(cache_dir())),
        )
    )
