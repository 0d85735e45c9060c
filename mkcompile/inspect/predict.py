"""What the planner says of a site, in the report's own words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mkcompile.config import Options
from mkcompile.ops.problem import Problem
from mkcompile.passes.fuse import Judge, fuse_all


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Times of one site: as it is, fused, and the least that its GEMMs or its link alone would take.

    Units: seconds. `measured_s` is the tuned time of the fused operator, or None where it was not tuned.
    """

    unfused_s: float
    fused_s: float
    ceiling_s: float
    decision: str
    variant: str = ""
    transport: str = ""
    measured_s: float | None = None

    @property
    def saving_s(self) -> float:
        """Predicted seconds saved by fusing; negative where fusing loses."""
        return self.unfused_s - self.fused_s


Predictor = Callable[[Problem], Estimate | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """The judge that the pass is given, the predictor for the report, and the machine that both think of."""

    judge: Judge
    predict: Predictor
    topology: str


def planner_for(options: Options) -> Planner:
    """The planner that the backend uses under these options."""
    return Planner(judge=fuse_all, predict=lambda problem: None, topology=options.topology)
