"""The planner's verdict in the pass's words."""

from __future__ import annotations

from mkcompile.ops.problem import Problem
from mkcompile.passes.fuse import Judge
from mkcompile.passes.reason import Reason
from mkcompile.plan import judge as planner
from mkcompile.plan.decide import Policy
from mkcompile.plan.disk import Results
from mkcompile.plan.plan import Refusal
from mkcompile.plan.topology import Topology


def judge_for(topology: Topology, policy: Policy, tuned: Results | None = None) -> Judge:
    """Seconds that fusing a problem saves on this machine, measured or predicted, or the reason not to."""
    decide = planner.judge_for(topology, policy, tuned)

    def judge(problem: Problem) -> float | Reason:
        verdict = decide(problem)
        return reason_for(verdict) if isinstance(verdict, Refusal) else verdict

    return judge


def reason_for(refusal: Refusal) -> Reason:
    """The reason of the same name; a group of one rank has another name here."""
    return Reason.WORLD_SIZE_ONE if refusal is Refusal.ONE_RANK else Reason[refusal.name]
