"""What the planner says of a site, in the report's own words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from mkcompile.config import Options
from mkcompile.ops.problem import Problem
from mkcompile.plan.decide import Policy
from mkcompile.plan.disk import Measured, Results, load_results
from mkcompile.plan.judge import predict
from mkcompile.plan.buckets import entry_name
from mkcompile.plan.topology import Topology
from mkcompile.runtime.machine import PROBE, policy_of, topology_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Times of one site: as it is, fused, and the least that its GEMMs or its link alone would take.

    Units: seconds. `fused_s` is None where no kernel takes the problem; the measured times are those of `tune` on the
    same machine, None where it did not run.
    """

    unfused_s: float
    fused_s: float | None
    ceiling_s: float
    decision: str
    plan: str
    transport: str
    measured_unfused_s: float | None = None
    measured_fused_s: float | None = None

    @property
    def rewritten_s(self) -> float:
        """The site's time once it is rewritten: without a kernel its reference does what the graph did."""
        return self.unfused_s if self.fused_s is None else self.fused_s

    @property
    def saving_s(self) -> float:
        """Predicted seconds saved by fusing; negative where fusing loses, 0 where it can't be."""
        return self.unfused_s - self.rewritten_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """The machine and the policy that the backend's pass decides by."""

    topology: Topology
    policy: Policy
    rehearsed: bool
    tuned: Results

    @property
    def machine(self) -> str:
        """The topology's name, and whether it stands for a machine that is not here."""
        return f"{self.topology.name} (rehearsed: no CUDA here)" if self.rehearsed else self.topology.name

    def predict(self, problem: Problem) -> Estimate:
        """The planner's prediction for one problem."""
        predicted = estimate(problem, self.topology, self.policy)
        candidates = self.tuned.entries.get(entry_name(problem), {}).values() if problem.m else ()
        return replace(
            predicted,
            measured_unfused_s=_fastest(one for one in candidates if not one.plan.fused),
            measured_fused_s=_fastest(one for one in candidates if one.plan.fused),
        )


def planner_for(options: Options) -> Planner:
    """What the backend plans by under these options. Raises: OptionError for an unknown topology."""
    name = options.topology
    topology = topology_of(name)
    return Planner(
        topology=topology,
        tuned=load_results(topology),
        policy=replace(policy_of(name), fuse=options.fuse),
        rehearsed=name == PROBE and not torch.cuda.is_available(),
    )


def _fastest(candidates: Iterable[Measured]) -> float | None:
    return min((one.seconds for one in candidates if one.seconds is not None), default=None)


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
