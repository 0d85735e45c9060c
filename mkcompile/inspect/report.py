"""The report as data: every collective, every graph, every break, and the totals."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from mkcompile.inspect.breaks import GraphBreak
from mkcompile.inspect.capture import Phase
from mkcompile.inspect.predict import Estimate
from mkcompile.inspect.snapshot import GraphView
from mkcompile.ops.problem import Problem
from mkcompile.passes.reason import Reason

NO_COLLECTIVE = "this model has no collective: it compiles as under backend='inductor'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective and what became of it. Rows with one `site` number became one operator.

    Units: `sent_bytes` bytes that each rank must send at least. `world_size` is 0 where the group is a graph value.
    """

    site: int
    graph: int
    phase: Phase
    node: str
    kind: str
    group: str
    world_size: int
    shape: tuple[str, ...]
    dtype: str
    sent_bytes: int
    operator: str | None = None
    reason: Reason | None = None
    detail: str = ""
    problem: Problem | None = None
    estimate: Estimate | None = None

    @property
    def fused(self) -> bool:
        """Did it become (part of) a fused operator?"""
        return self.operator is not None

    @property
    def why(self) -> str:
        """The sentence for a collective that stayed, with the node or size that decided it."""
        if self.reason is None:
            return ""
        return f"{self.reason.value} ({self.detail})" if self.detail else self.reason.value

    @property
    def sizes(self) -> str:
        """`m 8192, n 8192, k 3584`, where the problem is known."""
        if self.problem is None:
            return ""
        hidden = f", hidden {self.problem.hidden}" if self.problem.hidden else ""
        return f"m {self.problem.m or 'symbolic'}, n {self.problem.n}, k {self.problem.k}{hidden}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPair:
    """One graph before and after the pass, its nodes marked with site numbers."""

    phase: Phase
    before: GraphView
    after: GraphView


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over a report. Units: bytes each rank sends; seconds of one step (each graph once)."""

    collectives: float = 0
    fused: float = 0
    operators: float = 0
    sent_bytes: float = 0
    unfused_s: float = 0.0
    fused_s: float = 0.0

    def plus(self, other: Totals, times: int) -> Totals:
        """self + times * other."""
        return Totals(**{name: getattr(self, name) + times * getattr(other, name) for name in Totals.__slots__})

    @property
    def saving_s(self) -> float:
        """Predicted seconds saved a step."""
        return self.unfused_s - self.fused_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Extrapolation:
    """How a report on few layers stands for a model of many.

    `layer` is what one more layer adds, from compiling `compiled` layers and one less; `total` is all `layers`.
    """

    layers: int
    compiled: int
    layer: Totals
    total: Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `explain` returns. `print()`, `to_dict()` and `to_html(path)` show it."""

    model: str
    torch_version: str
    topology: str
    options: str
    collectives: tuple[Collective, ...]
    graphs: tuple[GraphPair, ...]
    breaks: tuple[GraphBreak, ...] = ()
    capture_s: float = 0.0
    extrapolation: Extrapolation | None = None
    notes: tuple[str, ...] = field(default=())

    def fused(self) -> list[Collective]:
        """The collectives that became part of an operator."""
        return [one for one in self.collectives if one.fused]

    def refused(self) -> list[Collective]:
        """The collectives that stay as they are, each with a reason."""
        return [one for one in self.collectives if not one.fused]

    def sites(self) -> list[list[Collective]]:
        """The rows by site number."""
        by_number: dict[int, list[Collective]] = {}
        for one in self.collectives:
            by_number.setdefault(one.site, []).append(one)
        return list(by_number.values())

    @property
    def totals(self) -> Totals:
        """Sums over what was compiled (not extrapolated)."""
        heads = [rows[0] for rows in self.sites() if rows[0].fused]
        estimates = [head.estimate for head in heads if head.estimate is not None]
        return Totals(
            collectives=len(self.collectives),
            fused=len(self.fused()),
            operators=len(heads),
            sent_bytes=sum(one.sent_bytes for one in self.collectives),
            unfused_s=sum(one.unfused_s for one in estimates),
            fused_s=sum(one.fused_s for one in estimates),
        )

    def print(self, console: Console | None = None) -> None:
        """Print tables of what was fused, what was not and why, and the totals."""
        from mkcompile.inspect.console import print_report

        print_report(self, console or Console())

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        from mkcompile.inspect.plain import report_to_dict

        return report_to_dict(self)

    def to_html(self, path: str | Path) -> Path:
        """Write one self-contained page; returns its path."""
        from mkcompile.inspect.html import write_html

        return write_html(self, Path(path))
