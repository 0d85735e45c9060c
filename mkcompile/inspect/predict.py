"""What the planner says of a site, in the report's own words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mkcompile.config import Options
from mkcompile.ops.problem import Problem
from mkcompile.passes.fuse import Judge, fuse_all
from mkcompile.passes.reason import Reason
from mkcompile.plan.decide import Policy
from mkcompile.plan.judge import judge_for, predict
from mkcompile.plan.plan import Refusal
from mkcompile.plan.topology import Topology, preset


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
    """The judge that the pass is given, the predictor for the report, and the machine that both think of.

    `topology` is None where nothing is predicted: the operators run as their reference.
    """

    judge: Judge
    predict: Callable[[Problem], Estimate | None]
    topology: Topology | None

    @property
    def machine(self) -> str:
        """The topology's name."""
        return self.topology.name if self.topology else "this machine, no CUDA"


def planner_for(options: Options) -> Planner:
    """The planner for the machine that the options name."""
    topology = _topology(options.topology)
    if topology is None:
        return Planner(judge=fuse_all, predict=lambda problem: None, topology=None)
    policy = Policy(fuse=options.fuse)
    decide = judge_for(topology, policy)

    def judge(problem: Problem) -> float | Reason:
        verdict = decide(problem)
        return reason_for(verdict) if isinstance(verdict, Refusal) else verdict

    return Planner(judge=judge, predict=lambda problem: estimate(problem, topology, policy), topology=topology)


def _topology(name: str) -> Topology | None:
    if name != "probe":
        return preset(name)
    return None if not torch.cuda.is_available() else preset("2xh200")


def reason_for(refusal: Refusal) -> Reason:
    """The pass's reason for the planner's refusal."""
    return Reason.__members__.get(refusal.name, Reason.NO_GAIN)


def estimate(problem: Problem, topology: Topology, policy: Policy) -> Estimate:
    """The planner's prediction for one problem."""
    found = predict(problem, topology, policy)
    plan = found.decision.plan
    return Estimate(
        unfused_s=found.unfused_s,
        fused_s=found.fused_s,
        ceiling_s=found.ceiling_s,
        decision="fuse" if found.refusal is None else f"keep: {found.refusal.value}",
        plan=f"{plan.variant} {plan.tile}" if found.refusal is None else plan.variant,
        transport=plan.transport,
    )
