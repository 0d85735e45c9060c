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
from mkcompile.runtime.gather_form import GatherForm
from mkcompile.runtime.gather_launch import GatherSize
from mkcompile.runtime.gather_schedule import choose_gather
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.tactics import gather_from_plan

SWEEP = Path(__file__).parents[2] / "benchmarks" / "results" / "2xh200" / "gather_sweep.jsonl"
ROWS = [json.loads(line) for line in SWEEP.read_text().splitlines()]


#: Commits whose fetches were by a kernel that has been replaced.
OTHER_PULLS = ("152bf66",)
STARTS = {"push": "push ", "copy_engine": "engine ", "library": "library c1", "remote_read": "read ", "pull": "pull "}


def weights(row: dict[str, Any]) -> tuple[int, ...]:
    """Columns of each."""
    return tuple(row.get("weights", (row["n"],)))


def measured(row: dict[str, Any], variant: str, tile: str) -> float | None:
    """Microseconds of the variant; chunks of the copy engine differ little but at the smallest shape."""
    start = STARTS[variant] if variant == "library" else f"{STARTS[variant]}{tile} "
    return min((one["us"] for name, one in row["variants"].items() if name.startswith(start)), default=None)


def swept(row: dict[str, Any]) -> set[str]:
    """The variants that were measured: remote reads are for narrow weights."""
    found = {variant for variant, start in STARTS.items() if any(name.startswith(start) for name in row["variants"])}
    return found - {"pull"} if row.get("commit") in OTHER_PULLS else found


def size_of(row: dict[str, Any]) -> GatherSize:
    """As the runtime sees it."""
    return GatherSize(segment_rows=row["m"] // 2, k=row["k"], n=weights(row), world=2)


def by_planner(row: dict[str, Any]) -> tuple[str, str]:
    """Variant, tile."""
    problem = Problem(
        operator="all_gather_gemm", m=row["m"], n=row["n"], k=row["k"], world_size=2, dtype="bfloat16", dtype_bytes=2,
        num_gemms=len(weights(row)),
    )  # fmt: skip
    site = Site(problem=problem, topology=PRESETS["2xh200"], reserve_sms=4)
    offered = (one for one in candidates(site) if one.plan.variant in swept(row))
    best = min(offered, key=lambda one: one.seconds)
    form = GatherForm(config=KernelConfig(operator="all_gather_gemm"), size=size_of(row), gathered_shape=())
    choice = gather_from_plan(form, best.plan, 128)
    assert choice is not None
    return choice.variant, f"{choice.config.block_m}x{choice.config.block_n}"


def by_runtime(row: dict[str, Any]) -> tuple[str, str]:
    """The same by the kernels' own model."""
    config = KernelConfig(operator="all_gather_gemm")
    offered = [one for variant in swept(row) for one in [choose_gather(config, size_of(row), 128, variant=variant)]]  # type: ignore[arg-type]
    best = min(offered, key=lambda one: one.us)
    return best.variant, f"{best.config.block_m}x{best.config.block_n}"


@pytest.mark.parametrize("choose", [by_planner, by_runtime])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['m']}x{'+'.join(map(str, weights(row)))}x{row['k']}")
def test_the_choice_is_within_5_percent_of_the_best(
    row: dict[str, Any], choose: Callable[[dict[str, Any]], tuple[str, str]]
) -> None:
    chosen = choose(row)
    us = measured(row, *chosen)
    starts = tuple(STARTS[variant] for variant in swept(row))
    best = min(one["us"] for name, one in row["variants"].items() if name.startswith(starts))
    assert us is not None and us <= 1.05 * best, (chosen, us, best)
