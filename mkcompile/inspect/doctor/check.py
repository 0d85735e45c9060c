"""What the doctor finds: one `Check` a thing, in sections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "off", "missing", "broken"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that is there or not.

    `off` is absent by choice or not applicable here. `cost` says what its lack costs, `remedy` how to get it.
    `needed`: without it the backend can't run at all.
    """

    name: str
    status: Status
    found: str
    cost: str = ""
    remedy: str = ""
    needed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Checks of one kind, and a matrix where there is one (header row first)."""

    title: str
    checks: tuple[Check, ...]
    matrix: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All sections."""

    sections: tuple[Section, ...]

    @property
    def checks(self) -> list[Check]:
        """All checks in order."""
        return [one for section in self.sections for one in section.checks]

    @property
    def can_run(self) -> bool:
        """Can the backend run here at all (with reference operators, if not with kernels)?"""
        return all(one.status == "ok" for one in self.checks if one.needed)

    @property
    def can_run_kernels(self) -> bool:
        """Can the fused kernels run here?"""
        wanted = {"GPUs", "NVRTC", "peer access", "symmetric memory", "fused kernels"}
        return self.can_run and wanted == {one.name for one in self.checks if one.name in wanted and one.status == "ok"}
