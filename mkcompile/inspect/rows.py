"""The rows of a report: what became of each collective, and each graph before and after."""

from __future__ import annotations

from dataclasses import dataclass

from mkcompile.inspect.capture import Phase
from mkcompile.inspect.predict import Estimate
from mkcompile.inspect.snapshot import GraphView
from mkcompile.ops.problem import Problem
from mkcompile.passes.reason import Reason, Residual


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective and what became of it. Rows with one `site` number became one operator.

    Units: `sent_bytes` bytes that each rank must send at least. `world_size` is 0 where the group is a graph value, and
    `transport`, what carries the group's data, is then empty.
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
    transport: str = ""
    residual: Residual | None = None

    @property
    def fused(self) -> bool:
        """Did it become (part of) a fused operator?"""
        return self.operator is not None

    @property
    def by_reference(self) -> bool:
        """Did it become an operator that no kernel takes there? It computes what the graph did, as it did."""
        return self.fused and self.estimate is not None and self.estimate.fused_s is None

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
