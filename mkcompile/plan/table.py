"""What launches are planned with: measured once a bucket of m, fitted to each m, with no recompilation.

A site whose number of tokens is not known when it is compiled is fused where some bucket gains; at run time its own m
decides, and that may be to leave this size unfused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

from mkcompile.ops.problem import Problem
from mkcompile.plan.buckets import BUCKETS, at_bucket, bucket
from mkcompile.plan.decide import Decision, Policy, best_candidate, decide
from mkcompile.plan.disk import Results
from mkcompile.plan.measured import decide_measured, measured_pair
from mkcompile.plan.plan import Plan
from mkcompile.plan.topology import Topology


@dataclass(slots=True)
class PlanTable:
    """Decisions by problem and bucket. `tuned` (from `tune`) goes before what is predicted.

    Every rank holds the same table: predictions are arithmetic, and measurements come from rank 0.
    """

    topology: Topology
    policy: Policy = field(default_factory=Policy)
    tuned: Results = field(default_factory=Results)
    _decisions: dict[tuple[str, int], Decision] = field(default_factory=dict)

    def plan(self, problem: Problem) -> Plan:
        """The bucket's plan for a problem whose m is known; `unfused` where fusing loses or is impossible.

        Raises: ValueError where m is 0.
        """
        return self.decision(problem).plan

    def launch(self, problem: Problem) -> Plan:
        """The plan for the problem's own m. Where its bucket was measured, that says whether to fuse and with which
        kernel; all else follows the size. Where it has no room beside the SMs that this launch leaves, or is not for
        this size, what is predicted counts.

        Raises: ValueError where m is 0.
        """
        if self.policy.fuse == "never":
            return self.plan(problem)
        if measured_pair(problem, self.tuned, self.policy) is None:
            return decide(problem, self.topology, self.policy).plan
        told = self.plan(problem)
        if not told.fused:
            return told
        fitting = best_candidate(problem, self.topology, self.policy, frozenset({told.name}))
        return decide(problem, self.topology, self.policy).plan if fitting is None else fitting.plan

    def decision(self, problem: Problem) -> Decision:
        """What stands behind a plan, at the bucket's bound."""
        place = (problem.key(), bucket(problem.m))
        found = self._decisions.get(place)
        if found is None:
            found = self._decisions[place] = self._decide(problem)
        return found

    def _decide(self, problem: Problem) -> Decision:
        bound = at_bucket(problem, problem.m)
        if self.policy.fuse == "never":
            return decide(bound, self.topology, replace(self.policy, available=frozenset()))
        return decide_measured(bound, self.topology, self.policy, self.tuned, bucket(problem.m))

    def fill(self, problem: Problem) -> dict[int, Plan]:
        """Plans for all buckets of a problem (its own m does not matter)."""
        return {rows: self.plan(replace(problem, m=rows)) for rows in BUCKETS}

    def to_json(self) -> str:
        """What was planned so far, canonical: equal tables, equal text."""
        plans = {f"m<={rows},{key}": json.loads(one.plan.to_json()) for (key, rows), one in self._decisions.items()}
        return json.dumps(plans, sort_keys=True, separators=(",", ":"))
