"""Plans for a symbolic m: one a bucket of m, made at the first use of the bucket, with no recompilation.

A site whose number of tokens is not known when it is compiled is fused where some number of tokens gains; at run time
the bucket's own plan is used, and that may be to leave this size unfused.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mkcompile.ops.problem import Problem
from mkcompile.plan.decide import Decision, Policy, decide
from mkcompile.plan.plan import Plan
from mkcompile.plan.topology import Topology

MAX_ROWS = 65536
_FINE_FROM, _STEPS_AN_OCTAVE = 128, 4


def _bounds() -> tuple[int, ...]:
    """Powers of two up to 128 rows, then four steps an octave."""
    powers = [1 << i for i in range(_FINE_FROM.bit_length() - 1)]
    fine: list[int] = []
    start = _FINE_FROM
    while start < MAX_ROWS:
        fine += [start * (_STEPS_AN_OCTAVE + i) // _STEPS_AN_OCTAVE for i in range(_STEPS_AN_OCTAVE)]
        start *= 2
    return (*powers, *fine, MAX_ROWS)


BUCKETS = _bounds()


def bucket(rows: int) -> int:
    """The smallest bucket bound that holds `rows`; above the last one, the last one.

    Raises: ValueError for less than one row.
    """
    if rows < 1:
        raise ValueError(f"m must be at least 1, got {rows}")
    return BUCKETS[min(bisect_left(BUCKETS, rows), len(BUCKETS) - 1)]


def at_bucket(problem: Problem, rows: int) -> Problem:
    """The problem at a bucket's bound, rounded up to what can be divided over the ranks."""
    step = problem.world_size * max(problem.outer, 1)
    return replace(problem, m=-(-bucket(rows) // step) * step)


@dataclass(slots=True)
class PlanTable:
    """Plans by problem and bucket. `measured` (from `tune`) goes before what is predicted.

    Every rank holds the same table: predictions are arithmetic, and measurements come from rank 0.
    """

    topology: Topology
    policy: Policy = field(default_factory=Policy)
    measured: Mapping[str, Plan] = field(default_factory=dict)
    _plans: dict[tuple[str, int], Plan] = field(default_factory=dict)

    def plan(self, problem: Problem) -> Plan:
        """The plan for a problem whose m is known; `unfused` where fusing loses or is impossible.

        Raises: ValueError where m is 0.
        """
        place = (problem.key(), bucket(problem.m))
        found = self._plans.get(place)
        if found is None:
            found = self._plans[place] = self._make(problem)
        return found

    def _make(self, problem: Problem) -> Plan:
        if self.policy.fuse == "never":
            return decide(at_bucket(problem, problem.m), self.topology, Policy(available=frozenset())).plan
        measured = self.measured.get(entry_name(problem))
        return self.decision(problem).plan if measured is None else measured

    def decision(self, problem: Problem) -> Decision:
        """The prediction behind a plan, at the bucket's bound."""
        return decide(at_bucket(problem, problem.m), self.topology, self.policy)

    def fill(self, problem: Problem) -> dict[int, Plan]:
        """Plans for all buckets of a problem (its own m does not matter)."""
        return {rows: self.plan(replace(problem, m=rows)) for rows in BUCKETS}

    def to_json(self) -> str:
        """What was planned so far, canonical: equal tables, equal text."""
        plans = {f"m<={rows},{key}": json.loads(plan.to_json()) for (key, rows), plan in self._plans.items()}
        return json.dumps(plans, sort_keys=True, separators=(",", ":"))


def entry_name(problem: Problem) -> str:
    """Name of a problem's bucket in tables of measurements."""
    return f"m<={bucket(problem.m)},{problem.key()}"
