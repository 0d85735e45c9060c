"""Measurements in the place of predictions, where `tune` has made them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mkcompile.ops.problem import Problem
from mkcompile.plan.buckets import entry_name
from mkcompile.plan.decide import Decision, Policy, decide, unfused_plan
from mkcompile.plan.disk import Measured, Results
from mkcompile.plan.plan import Refusal
from mkcompile.plan.topology import Topology

# Refusals that a measurement can overrule: the others say that no kernel can take the problem.
_BY_TIME = (Refusal.NO_GAIN, Refusal.TINY_PAYLOAD)


def fastest(measured: Iterable[Measured]) -> Measured | None:
    """The fastest that ran; of equals the one whose plan comes first."""
    ran = [one for one in measured if one.seconds is not None]
    return min(ran, key=lambda one: (one.seconds, one.plan.to_json()), default=None)


def measured_pair(problem: Problem, tuned: Results, policy: Policy, rows: int = 0) -> tuple[Measured, Measured] | None:
    """The unfused sequence and the best fused candidate of the problem's bucket, where both were measured.

    `rows`: the bucket, where the problem's own m is that of another (rounded up to be divided).
    """
    name = entry_name(replace(problem, m=rows or problem.m))
    candidates = tuned.entries.get(name, {}).values()
    unfused = fastest(one for one in candidates if not one.plan.fused)
    fused = fastest(one for one in candidates if one.plan.fused and policy.allows(one.plan))
    return None if unfused is None or fused is None else (unfused, fused)


def decide_measured(
    problem: Problem, topology: Topology, policy: Policy, tuned: Results | None = None, rows: int = 0
) -> Decision:
    """As `decide`, with the times that were measured for the problem's bucket (see `measured_pair` for `rows`).

    Raises: ValueError where m is 0.
    """
    decision = decide(problem, topology, policy)
    pair = None if tuned is None else measured_pair(problem, tuned, policy, rows)
    if pair is None or (decision.refusal is not None and decision.refusal not in _BY_TIME):
        return decision
    unfused, fused = pair
    assert unfused.seconds is not None and fused.seconds is not None
    told = replace(decision, unfused_s=unfused.seconds, fused_s=fused.seconds, measured=True)
    detail = f"measured {fused.seconds * 1e6:.1f} us fused, {unfused.seconds * 1e6:.1f} us unfused"
    if fused.seconds < unfused.seconds or policy.fuse == "always":
        return replace(told, plan=fused.plan, refusal=None, detail=detail)
    return replace(told, plan=unfused_plan(problem, topology), refusal=Refusal.NO_GAIN, detail=detail)
