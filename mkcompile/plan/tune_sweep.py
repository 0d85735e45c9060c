"""Every candidate's time, kept as JSON lines: how far the planner's choice is from the best that it could have made."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mkcompile.ops.problem import Problem
from mkcompile.plan.buckets import at_bucket, entry_name
from mkcompile.plan.candidates import Site, candidates
from mkcompile.plan.decide import best_candidate, decide, unfused_plan
from mkcompile.plan.disk import Measured, Results, candidate_name
from mkcompile.plan.tune import Request


def write_sweep(path: Path, request: Request, results: Results) -> None:
    """Append a line for each measured candidate of each problem."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for row in sweep_rows(request, results):
            file.write(json.dumps(row) + "\n")


def sweep_rows(request: Request, results: Results) -> Iterator[dict[str, Any]]:
    """Units: microseconds. `chosen` marks what the planner takes without measurements, of the fused candidates."""
    for problem in dict.fromkeys(request.problems):
        bound = at_bucket(problem, problem.m)
        site = Site(problem=bound, topology=request.topology, reserve_sms=request.policy.reserve_sms)
        predicted = {candidate_name(one.plan): one.seconds for one in candidates(site)}
        decision = decide(bound, request.topology, request.policy)
        predicted[candidate_name(unfused_plan(bound, request.topology))] = decision.unfused_s
        best = best_candidate(bound, request.topology, request.policy)
        chosen = "" if best is None else candidate_name(best.plan)
        for measured in results.entries.get(entry_name(problem), {}).values():
            name = candidate_name(measured.plan)
            yield _row(bound, measured, predicted.get(name)) | {
                "chosen": name == chosen,
                "reserve": request.policy.reserve_sms,
                "machine": request.topology.name,
                "versions": dict(request.topology.versions),
            }


def _row(problem: Problem, measured: Measured, predicted_s: float | None) -> dict[str, Any]:
    plan = measured.plan
    return {
        "op": problem.operator, "M": problem.m, "N": problem.n, "K": problem.k, "world": problem.world_size,
        "dtype": problem.dtype, "variant": plan.variant, "tile": str(plan.tile) if plan.fused else "",
        "grid": plan.grid, "push_blocks": plan.roles.intra, "split": plan.split, "chunk_bytes": plan.chunk_bytes,
        "lag": plan.lag, "pace_ns": plan.pace_ns,
        "us": _us(measured.seconds), "predicted_us": _us(predicted_s), "error": measured.error,
    }  # fmt: skip


def _us(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e6, 2)


def regrets(rows: Sequence[dict[str, Any]]) -> dict[tuple[Any, ...], float]:
    """By problem: the chosen candidate's time over the best one's, of the fused candidates that ran."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if row["variant"] != "unfused" and row["us"] is not None:
            groups.setdefault(tuple(row[name] for name in ("op", "M", "N", "K", "world", "reserve")), []).append(row)
    chosen = {key: [one["us"] for one in group if one["chosen"]] for key, group in groups.items()}
    return {key: chosen[key][0] / min(one["us"] for one in group) for key, group in groups.items() if chosen[key]}
