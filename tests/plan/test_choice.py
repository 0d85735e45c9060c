"""The planner's kernels against the best that `tune` found, and against what the kernels' own model would take."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shapes import REDUCED, Shape
from mkcompile.plan import PRESETS, Policy
from mkcompile.plan.candidates import Site, candidates
from mkcompile.plan.decide import best_candidate
from mkcompile.plan.plan import Plan
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.tile_schedule import LaunchSize, choose_schedule, choose_tile
from tests.plan.problems import problem

PAIR = PRESETS["2xh200"]
RESERVE = 4
FEW_ROWS = 1024
SWEEP = Path(__file__).parents[2] / "benchmarks" / "results" / "2xh200" / "sweep.jsonl"
KERNELS = {"gemm_reduce_scatter": "push", "gemm_all_reduce": "staged"}


def by_the_kernels_model(operator: str, shape: Shape) -> tuple[KernelConfig, int, int, int]:
    """Tile, lag, pace and grid."""
    size = LaunchSize(m=shape.m, n=shape.n, k=shape.k, world=2)
    base = KernelConfig(operator=operator, broadcast="staged" if operator == "gemm_all_reduce" else "none")  # type: ignore[arg-type]
    config = choose_tile(base, size, PAIR.gpu.num_sms - RESERVE)
    schedule = choose_schedule(config, size, PAIR.gpu.num_sms - RESERVE)
    return config, schedule.lag, schedule.pace_ns, schedule.grid


@pytest.mark.parametrize("operator", KERNELS)
@pytest.mark.parametrize("shape", REDUCED, ids=lambda shape: f"{shape.m}x{shape.n}x{shape.k}")
def test_the_planners_choice_is_the_same_or_predicted_to_be_faster(operator: str, shape: Shape) -> None:
    one = problem(operator, shape.m, shape.n, shape.k)
    policy = Policy(fuse="always", reserve_sms=RESERVE, available=frozenset({f"{operator}/{KERNELS[operator]}"}))
    chosen = best_candidate(one, PAIR, policy)
    assert chosen is not None
    config, lag, pace_ns, grid = by_the_kernels_model(operator, shape)
    tile = f"{config.block_m}x{config.block_n}x64"
    site = Site(problem=one, topology=PAIR, reserve_sms=RESERVE)
    offered = [c for c in candidates(site) if policy.allows(c.plan)]
    theirs = next(c for c in offered if str(c.plan.tile) == tile)
    assert chosen.seconds <= theirs.seconds
    if str(chosen.plan.tile) == tile:
        assert (chosen.plan.grid, chosen.plan.lag) == (grid, lag)
        assert chosen.plan.pace_ns == pytest.approx(pace_ns, rel=0.05) or one.k <= 2048


def swept() -> dict[tuple[str, int, int, int], list[dict[str, Any]]]:
    """What `tune --sweep` measured of reductions, by problem. (Gathers and few rows have other kernels since:
    `test_prediction` judges the latter.)
    """
    places: dict[tuple[str, int, int, int], list[dict[str, Any]]] = {}
    for row in map(json.loads, SWEEP.read_text().splitlines()):
        if row["variant"] != "unfused" and row["op"] != "all_gather_gemm" and row["M"] > FEW_ROWS:
            places.setdefault((row["op"], row["M"], row["N"], row["K"]), []).append(row)
    return places


def regret(place: tuple[str, int, int, int], rows: list[dict[str, Any]]) -> float:
    """The measured time of the kernel that is predicted to be fastest of those measured, over the fastest measured."""
    times = {(row["variant"], row["tile"], row["split"]): row["us"] for row in rows}
    predicted = {
        (one.plan.variant, str(one.plan.tile), one.plan.split): one.seconds
        for one in candidates(Site(problem=problem(*place), topology=PAIR, reserve_sms=RESERVE))
    }
    chosen = min((key for key in times if key in predicted), key=lambda key: predicted[key])
    return float(times[chosen] / min(times.values()))


def test_of_what_tune_measured_the_choice_is_within_5_percent_of_the_best() -> None:
    regrets = {place: regret(place, rows) for place, rows in swept().items()}
    assert len(regrets) == 6
    assert max(regrets.values()) <= 1.05, regrets


def test_equal_plans_have_equal_names_and_digests_and_a_split_is_part_of_both() -> None:
    one = problem("gemm_all_reduce", 16, 4096, 7168)
    plan = next(c.plan for c in candidates(Site(problem=one, topology=PAIR, reserve_sms=4)) if c.plan.split == 2)
    assert plan.name.endswith("/2") and Plan.from_json(plan.to_json()).digest() == plan.digest()
    assert replace(plan, split=1).digest() != plan.digest()
