"""What the planner says of a site, in the report's own words."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mkcompile.config import Options
from mkcompile.inspect.transport import transport_of
from mkcompile.ops.problem import Problem
from mkcompile.plan.buckets import entry_name
from mkcompile.plan.decide import Policy
from mkcompile.plan.disk import Measured, Results, load_results
from mkcompile.plan.judge import predict
from mkcompile.plan.measured import fastest
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
    name: str = PROBE

    @property
    def machine(self) -> str:
        """The topology's name, and whether it stands for a machine that is not here."""
        return f"{self.topology.name} (rehearsed: no CUDA here)" if self.rehearsed else self.topology.name

    def transport(self, group: str) -> str:
        """What carries the data of the group of that name."""
        return transport_of(self.name, group, rehearsed=self.rehearsed)

    def predict(self, problem: Problem) -> Estimate:
        """The planner's prediction for one problem."""
        predicted = estimate(problem, self.topology, self.policy, self.tuned)
        candidates = self.tuned.entries.get(entry_name(problem), {}).values() if problem.m else ()
        return replace(
            predicted,
            measured_unfused_s=_seconds(fastest(one for one in candidates if not one.plan.fused)),
            measured_fused_s=_seconds(fastest(one for one in candidates if one.plan.fused)),
        )


def planner_for(options: Options) -> Planner:
    """What the backend plans by under these options; measurements are those on this rank's disk.

    Raises: OptionError for an unknown topology.
    """
    name = options.topology
    topology = topology_of(name)
    return Planner(
        name=name,
        topology=topology,
        tuned=load_results(topology),
        policy=replace(policy_of(), fuse=options.fuse),
        rehearsed=name == PROBE and not torch.cuda.is_available(),
    )


def _seconds(measured: Measured | None) -> float | None:
    return None if measured is None else measured.seconds


def estimate(problem: Problem, topology: Topology, policy: Policy, tuned: Results | None = None) -> Estimate:
    """The planner's prediction for one problem, and what it decides where measurements go before it."""
    found = predict(problem, topology, policy)
    told = found if tuned is None else predict(problem, topology, policy, tuned)
    plan, detail = told.decision.plan, told.decision.detail
    kept = "" if told.refusal is None else f"keep: {told.refusal.value}" + (f" ({detail})" if detail else "")
    return Estimate(
        unfused_s=found.unfused_s,
        fused_s=found.fused_s,
        ceiling_s=found.ceiling_s,
        decision=kept or "fuse",
        plan=f"{plan.variant} {plan.tile}" if told.refusal is None else plan.variant,
        transport=plan.transport,
    )
