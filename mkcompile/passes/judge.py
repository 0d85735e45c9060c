"""The planner's verdict in the pass's words."""

from __future__ import annotations

from dataclasses import replace

from mkcompile.ops.problem import Problem
from mkcompile.passes.fuse import Judge, fuse_all
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


# What a site without a kernel weighs against one with: any such site gives way, and still any is fused.
WITHOUT_KERNEL = 1e-12


def kernels_first(topology: Topology, policy: Policy) -> Judge:
    """The judge that fuses whatever is legal, as `fuse_all`, but prefers sites that a kernel takes on this machine.

    Under a policy that does not say which kernels exist, all sites are alike.
    """
    if policy.available is None:
        return fuse_all
    decide = planner.judge_for(topology, replace(policy, fuse="always"))

    def judge(problem: Problem) -> float:
        has_kernel = not isinstance(decide(problem), Refusal)
        return fuse_all(problem) * (1.0 if has_kernel else WITHOUT_KERNEL)

    return judge


def reason_for(refusal: Refusal) -> Reason:
    """The reason of the same name; a group of one rank has another name here."""
    return Reason.WORLD_SIZE_ONE if refusal is Refusal.ONE_RANK else Reason[refusal.name]
