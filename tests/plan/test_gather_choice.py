"""Of all ways to carry out an all-gather, a good one is chosen: judged by what was measured of each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mkcompile.ops.problem import Problem
from mkcompile.plan.candidates import candidates
from mkcompile.plan.site import Site
from mkcompile.plan.topology import PRESETS
from mkcompile.runtime.gather_launch import GatherSize
from mkcompile.runtime.gather_schedule import choices
from mkcompile.runtime.kernel_config import KernelConfig

SWEEP = Path(__file__).parents[2] / "benchmarks" / "results" / "2xh200" / "gather_sweep.jsonl"
ROWS = [json.loads(line) for line in SWEEP.read_text().splitlines()]


def measured(row: dict[str, object], variant: str, tile: str) -> float | None:
    """Microseconds of the variant; chunks of the copy engine differ little but at the smallest shape."""
    starts = {"push": f"push {tile} ", "copy_engine": f"engine {tile} ", "library": "library c1"}
    found = [one["us"] for name, one in row["variants"].items() if name.startswith(starts[variant])]  # type: ignore[attr-defined]
    return min(found, default=None)


def swept(row: dict[str, Any]) -> set[str]:
    """The variants that were measured; remote reads are for narrower weights than these."""
    starts = {"push": "push", "engine": "copy_engine", "library": "library"}
    return {variant for start, variant in starts.items() if any(name.startswith(start) for name in row["variants"])}


def by_planner(row: dict[str, Any]) -> tuple[str, str]:
    """Variant, tile."""
    problem = Problem(
        operator="all_gather_gemm", m=row["m"], n=row["n"], k=row["k"], world_size=2, dtype="bfloat16", dtype_bytes=2
    )
    site = Site(problem=problem, topology=PRESETS["2xh200"], reserve_sms=4)
    offered = (one for one in candidates(site) if one.plan.variant in swept(row))
    best = min(offered, key=lambda one: one.seconds)
    return best.plan.variant, f"{best.plan.tile.rows}x{best.plan.tile.columns}"


def by_runtime(row: dict[str, Any]) -> tuple[str, str]:
    """The same by the kernels' own model."""
    size = GatherSize(segment_rows=row["m"] // 2, k=row["k"], n=(row["n"],), world=2)
    offered = choices(KernelConfig(operator="all_gather_gemm"), size, 128, returned=False)
    best = min((one for one in offered if one.variant in swept(row)), key=lambda one: one.us)
    return best.variant, f"{best.config.block_m}x{best.config.block_n}"


@pytest.mark.parametrize("choose", [by_planner, by_runtime])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['m']}x{row['n']}x{row['k']}")
def test_the_choice_is_within_5_percent_of_the_best(
    row: dict[str, Any], choose: Callable[[dict[str, Any]], tuple[str, str]]
) -> None:
    chosen = choose(row)
    us = measured(row, *chosen)
    best = min(one["us"] for name, one in row["variants"].items() if name != "cublas")
    assert us is not None and us <= 1.05 * best, (chosen, us, best)
