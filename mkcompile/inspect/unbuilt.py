"""Operators that the planner knows and no GPU has a kernel for yet."""

from __future__ import annotations

from collections.abc import Sequence

from mkcompile.inspect.rows import Collective
from mkcompile.runtime.tactics import AVAILABLE


def notes_on(rows: Sequence[Collective]) -> list[str]:
    """A sentence for each operator that a machine which is not here was planned with, though it has no kernel yet."""
    with_kernel = {name.split("/")[0] for name in AVAILABLE}
    sites: dict[str, set[int]] = {}
    for row in rows:
        planned = row.estimate is not None and row.estimate.decision == "fuse" and row.estimate.fused_s is not None
        if row.fused and planned and row.problem is not None and row.problem.operator not in with_kernel:
            sites.setdefault(row.problem.operator, set()).add(row.site)
    return [
        f"{operator} (site {', '.join(map(str, sorted(numbers)))}) is planned, and has no kernel yet: GPUs leave it to "
        "smaller operators, whose collectives are fused one by one"
        for operator, numbers in sorted(sites.items())
    ]
