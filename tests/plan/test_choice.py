"""The planner's kernels against the best that `tune` found, and against what the kernels' own model would take."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shapes import REDUCED, Shape
from mkcompile.plan import PRESETS, Policy
from mkcompile.plan.candidates import Site, candidates
from mkcompile.plan.decide import best_candidate
from mkcompile.plan.fit_stream import FILES
from mkcompile.plan.kernels import AVAILABLE
from mkcompile.plan.plan import Plan
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.tile_schedule import LaunchSize, choose_schedule, choose_tile
from tests.plan.problems import problem

PAIR = PRESETS["2xh200"]
RESERVE = 4
FEW_ROWS = 1024
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "2xh200"
SWEEP = RESULTS / "sweep.jsonl"
#: All kernels of 1 to 1024 rows, those for many rows too, at what planners of other days took.
FEW_RUNS = (
    "small.jsonl", "small_chosen.jsonl", "small_chosen_87a4b34.jsonl", "small_chosen_c978b4e.jsonl", "small_ends.jsonl",
    *FILES,
)  # fmt: skip
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


def launched() -> dict[tuple[tuple[str, int, int, int], str], str]:
    """What ran as a planner had it, at 2048 rows and more: problem and variant, and the kernel with its schedule."""
    variants = {"mkcompile_direct": "direct", "mkcompile_staged": "staged", "mkcompile": "push"}
    rows = map(json.loads, (RESULTS / "ops_87a4b34.jsonl").read_text().splitlines())
    return {
        ((row["op"], row["M"], row["N"], row["K"]), variants[row["contender"]]): row["variant"]
        for row in rows
        if row["op"] in KERNELS and row["contender"] in variants and row["regime"] == "sustained"
    }


# Lags of a whole band since (decision 302).
SINCE = {
    (("gemm_reduce_scatter", 16384, 16384, 2048), "push"): ("lag256", "lag512"),
    (("gemm_reduce_scatter", 32768, 32768, 4096), "push"): ("lag256", "lag1024"),
}


def test_plans_are_those_that_ran() -> None:
    """A change of constants changes no launch of the benchmarks' reductions that was measured."""
    assert len(launched()) == 33
    for (place, variant), ran in launched().items():
        ran = ran.replace(*SINCE.get((place, variant), ("", "")))
        policy = Policy(fuse="always", reserve_sms=RESERVE, available=frozenset({f"{place[0]}/{variant}"}))
        best = best_candidate(problem(*place), PAIR, policy)
        assert best is not None
        plan = best.plan
        told = f"{plan.tile.rows}x{plan.tile.columns} grid{plan.grid} lag{plan.lag} pace{plan.pace_ns}"
        assert told == " ".join(ran.split()[:4]), (place, variant)


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


def few_rows(relative: bool = False) -> dict[tuple[str, int, int, int], dict[tuple[str, str, int], float]]:
    """Microseconds of each kernel (variant, tile, split) in CUDA graphs, the best of the runs, by problem.

    `relative`: over cuBLAS's GEMM in the same run; a chip that is hot takes longer for all.
    """
    rows = [(name, json.loads(line)) for name in FEW_RUNS for line in (RESULTS / name).read_text().splitlines()]
    rows = [(name, row) for name, row in rows if row["checked"] and row["regime"] == "graph" and row["op"] in KERNELS]
    places: dict[tuple[str, int, int, int], dict[tuple[str, str, int], float]] = {}
    cublas = {(name, *place_of(row)): row["ms"] * 1e3 for name, row in rows if row["contender"] == "cublas"}
    for name, row in rows:
        if not row["contender"].startswith("mkcompile"):
            continue
        found = re.search(r"_(\d+x\d+)_.*_(stream|staged|direct|nk)(\d?)", row["variant"])
        assert found is not None, row
        variant = "push" if found[2] == "nk" else found[2]
        times = places.setdefault(place_of(row), {})
        kernel = (variant, f"{found[1]}x64", int(found[3] or 1))
        us = row["ms"] * 1e3 / (cublas[name, *place_of(row)] if relative else 1)
        times[kernel] = min(times.get(kernel, 1e9), us)
    return places


def place_of(row: dict[str, Any]) -> tuple[str, int, int, int]:
    return row["op"], row["M"], row["N"], row["K"]


def test_of_few_rows_the_choice_is_within_5_percent_of_the_best_of_all_kernels() -> None:
    regrets = {}
    for place, times in few_rows(relative=True).items():
        chosen = best_candidate(problem(*place), PAIR, Policy(available=AVAILABLE))
        assert chosen is not None
        plan = chosen.plan
        regrets[place] = times[plan.variant, str(plan.tile), plan.split] / min(times.values())
    assert len(regrets) == 60
    assert max(regrets.values()) <= 1.05, regrets


def test_kernels_for_many_rows_are_predicted_at_few_rows_too() -> None:
    """Reduce-scatters that the planner would take where it knew no better: 64 to 1024 rows, within 15 %."""
    errors = {}
    for place, times in few_rows().items():
        site = Site(problem=problem(*place), topology=PAIR, reserve_sms=RESERVE)
        predicted = {(one.plan.variant, str(one.plan.tile)): one.seconds * 1e6 for one in candidates(site)}
        for (variant, tile, _), us in times.items():
            if variant == "push" and place[1] >= 64:
                errors[place, tile] = predicted[variant, tile] / us - 1
    assert len(errors) >= 20
    assert max(map(abs, errors.values())) < 0.15, errors


def test_equal_plans_have_equal_names_and_digests_and_a_split_is_part_of_both() -> None:
    one = problem("gemm_all_reduce", 16, 4096, 7168)
    plan = next(c.plan for c in candidates(Site(problem=one, topology=PAIR, reserve_sms=4)) if c.plan.split == 2)
    assert plan.name.endswith("/2") and Plan.from_json(plan.to_json()).digest() == plan.digest()
    assert replace(plan, split=1).digest() != plan.digest()
