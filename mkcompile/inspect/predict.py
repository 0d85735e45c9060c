"""What the planner says of a site, in the report's own words."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mkcompile.config import Options
from mkcompile.ops.problem import Problem
from mkcompile.plan.decide import Policy
from mkcompile.plan.judge import predict
from mkcompile.plan.topology import Topology
from mkcompile.runtime.machine import PROBE, policy_of, topology_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Times of one site: as it is, fused, and the least that its GEMMs or its link alone would take.

    Units: seconds. `fused_s` is None where no kernel takes the problem; `measured_s` the tuned time of the fused
    operator, or None where it was not tuned.
    """

    unfused_s: float
    fused_s: float | None
    ceiling_s: float
    decision: str
    plan: str
    transport: str
    measured_s: float | None = None

    @property
    def saving_s(self) -> float:
        """Predicted seconds saved by fusing; negative where fusing loses, 0 where it can't be."""
        return 0.0 if self.fused_s is None else self.unfused_s - self.fused_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """The machine and the policy that the backend's pass decides by."""

    topology: Topology
    policy: Policy
    rehearsed: bool

    @property
    def machine(self) -> str:
        """The topology's name, and whether it stands for a machine that is not here."""
        return f"{self.topology.name} (rehearsed: no CUDA here)" if self.rehearsed else self.topology.name

    def predict(self, problem: Problem) -> Estimate:
        """The planner's prediction for one problem."""
        return estimate(problem, self.topology, self.policy)


def planner_for(options: Options) -> Planner:
    """What the backend plans by under these options. Raises: OptionError for an unknown topology."""
    name = options.topology
    return Planner(
        topology=topology_of(name),
        policy=replace(policy_of(name), fuse=options.fuse),
        rehearsed=name == PROBE and not torch.cuda.is_available(),
    )


def estimate(problem: Problem, topology: Topology, policy: Policy) -> Estimate:
    """The planner's prediction for one problem."""
    found = predict(problem, topology, policy)
    plan, detail = found.decision.plan, found.decision.detail
    kept = "" if found.refusal is None else f"keep: {found.refusal.value}" + (f" ({detail})" if detail else "")
    return Estimate(
        unfused_s=found.unfused_s,
        fused_s=found.fused_s,
        ceiling_s=found.ceiling_s,
        decision=kept or "fuse",
        plan=f"{plan.variant} {plan.tile}" if found.refusal is None else plan.variant,
        transport=plan.transport,
    )
