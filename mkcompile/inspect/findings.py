"""What a report says, as data: every collective, every graph, every break, and the totals."""

from __future__ import annotations

from dataclasses import dataclass, field

from mkcompile.inspect.breaks import GraphBreak
from mkcompile.inspect.rows import Collective, GraphPair
from mkcompile.inspect.timeline import Timelines

NO_COLLECTIVE = "this model has no collective: it compiles as under backend='inductor'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over a report: over its fused sites, and of the whole step.

    Units: bytes that each rank sends; seconds of one step (each graph once).
    """

    collectives: float = 0
    fused: float = 0
    operators: float = 0
    sent_bytes: float = 0
    unfused_s: float = 0.0
    fused_s: float = 0.0
    step_unfused_s: float = 0.0
    step_fused_s: float = 0.0

    def plus(self, other: Totals, times: int) -> Totals:
        """self + times * other."""
        return Totals(**{name: getattr(self, name) + times * getattr(other, name) for name in Totals.__slots__})

    @property
    def saving_s(self) -> float:
        """Predicted seconds saved a step: what overlaps already, as it is, is no gain."""
        return self.step_unfused_s - self.step_fused_s


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
class Findings:
    """What was found in a model, and what became of it."""

    model: str
    torch_version: str
    topology: str
    options: str
    collectives: tuple[Collective, ...]
    graphs: tuple[GraphPair, ...]
    breaks: tuple[GraphBreak, ...] = ()
    capture_s: float = 0.0
    timelines: Timelines | None = None
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
    def folded(self) -> int:
        """Collectives that the graphs had and that normalising merged into others."""
        found = sum(node.role == "collective" for pair in self.graphs for node in pair.before.nodes)
        return found - len(self.collectives)

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
            fused_s=sum(one.rewritten_s for one in estimates),
            step_unfused_s=self.timelines.unfused.end_s if self.timelines else 0.0,
            step_fused_s=self.timelines.fused.end_s if self.timelines else 0.0,
        )
