"""`judge_for`: the planner as the pass sees it, a function from a problem to the seconds saved or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mkcompile.ops.problem import Problem
from mkcompile.plan.buckets import BUCKETS, at_bucket
from mkcompile.plan.decide import DEFAULT_POLICY, Decision, Policy
from mkcompile.plan.disk import Results
from mkcompile.plan.kernels import ADDING
from mkcompile.plan.measured import decide_measured
from mkcompile.plan.plan import Refusal
from mkcompile.plan.topology import Topology

Judge = Callable[[Problem], float | Refusal]
_LEAST_S = 1e-9


def judge_for(topology: Topology, policy: Policy = DEFAULT_POLICY, tuned: Results | None = None) -> Judge:
    """Seconds that fusing saves, as measured or else predicted (above 0), or why not to fuse.

    With `fuse="always"` a loss still counts as the smallest saving. A symbolic m is judged by all buckets.
    """

    def judge(problem: Problem) -> float | Refusal:
        summary = predict(problem, topology, policy, tuned)
        return max(summary.saving_s, _LEAST_S) if summary.refusal is None else summary.refusal

    return judge


def adds(problem: Problem, topology: Topology, policy: Policy = DEFAULT_POLICY, tuned: Results | None = None) -> bool:
    """Is the problem, whose m is known, planned with a kernel that adds its result to a residual in place?"""
    if not problem.m or topology.span_of(problem).num_nodes > 1:
        return False
    decision = decide_measured(problem, topology, policy, tuned)
    plan = decision.plan
    return decision.refusal is None and f"{plan.operator}/{plan.variant}" in ADDING


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a report shows of a site. Units: seconds; for a symbolic m means over the buckets.

    `decision` is that of the problem itself, or of the middle bucket that is decided alike.
    """

    decision: Decision
    unfused_s: float
    fused_s: float | None
    ceiling_s: float
    saving_s: float
    refusal: Refusal | None


def predict(
    problem: Problem, topology: Topology, policy: Policy = DEFAULT_POLICY, tuned: Results | None = None
) -> Prediction:
    """The decision, or for a symbolic m what the decisions of its buckets come to: fused where one of them gains."""
    if problem.m:
        decisions = [decide_measured(problem, topology, policy, tuned)]
    else:
        decisions = [decide_measured(at_bucket(problem, m), topology, policy, tuned, m) for m in BUCKETS]
    fused = [one for one in decisions if one.refusal is None]
    telling = fused or decisions
    middle = telling[len(telling) // 2]
    count = len(decisions)
    return Prediction(
        decision=middle,
        unfused_s=sum(one.unfused_s for one in decisions) / count,
        fused_s=sum(one.chosen_s for one in decisions) / count if fused else middle.fused_s,
        ceiling_s=sum(one.ceiling_s for one in decisions) / count,
        saving_s=sum(one.saving_s for one in fused) / count,
        refusal=None if fused else decisions[-1].refusal,
    )
