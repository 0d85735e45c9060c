"""What kernels would gain that the planner knows and that do not exist yet. No plan and no total counts on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mkcompile.inspect.predict import Planner
from mkcompile.inspect.rows import Collective
from mkcompile.inspect.units import time_text
from mkcompile.passes.reason import Reason
from mkcompile.plan.judge import predict

# Fused, or left by the planner alone: another kernel would change that.
_OPEN = (None, Reason.NO_GAIN, Reason.TINY_PAYLOAD, Reason.NO_KERNEL)


def notes_on(rows: Sequence[Collective], planner: Planner) -> list[str]:
    """One sentence where such kernels would be faster than what is planned: which, at what sites, and by how much."""
    names: set[str] = set()
    sites: set[int] = set()
    planned_s = with_them_s = 0.0
    for row in rows:
        if row.site in sites or row.problem is None or row.reason not in _OPEN:
            continue
        known = predict(row.problem, planner.topology, planner.policy)
        free = predict(row.problem, planner.topology, replace(planner.policy, available=None))
        if free.refusal is None and free.saving_s > known.saving_s:
            plan = free.decision.plan
            names.add(f"{plan.operator}/{plan.variant}")
            sites.add(row.site)
            planned_s += known.unfused_s - known.saving_s
            with_them_s += free.unfused_s - free.saving_s
    if not sites:
        return []
    where = f"site{'s' if len(sites) > 1 else ''} {', '.join(map(str, sorted(sites)))}"
    return [
        f"kernels that do not exist yet ({', '.join(sorted(names))}) would take {time_text(with_them_s)} in place of "
        f"{time_text(planned_s)} at {where}: no plan and no total counts on them"
    ]
