"""Every plan that the planner may make for this machine's launcher can be launched and timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from mkcompile.errors import UnsupportedDeviceError
from mkcompile.ops.problem import Problem
from mkcompile.plan.candidates import Site, candidates
from mkcompile.plan.decide import Policy
from mkcompile.plan.kernels import AVAILABLE
from mkcompile.plan.plan import Plan
from mkcompile.plan.reference import Maker
from mkcompile.plan.topology import preset
from mkcompile.runtime import measure
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.measure import KernelMeasurer, num_calls
from tests.plan.problems import problem
from tests.runtime.fakes import FakeDriver, FakePlatform, lone_group

MAX_GRID = 128
RESERVE = 4
PROBLEMS = [
    problem("gemm_all_reduce", 64, 512, 256),
    problem("gemm_all_reduce", 1024, 1024, 64, has_bias=True),
    problem("gemm_reduce_scatter", 256, 512, 128, outer=2),
    problem("gemm_reduce_scatter", 64, 512, 256, weight_layout="kn"),
    problem("all_gather_gemm", 1024, 512, 64),
    problem("all_gather_gemm", 256, 512, 64, num_gemms=2, returns_gathered=True),
]


def run_each(calls: Sequence[Callable[[], Any]], count: int) -> float:
    """Instead of timing: every call once."""
    assert count >= len(calls) >= 1
    return float(sum(call() is not None for call in calls))


def plans_of(one: Problem) -> list[Plan]:
    policy = Policy(fuse="always", reserve_sms=RESERVE, available=AVAILABLE)
    site = Site(problem=one, topology=preset("2xh200"), reserve_sms=RESERVE)
    return [candidate.plan for candidate in candidates(site) if policy.allows(candidate.plan)]


@pytest.mark.parametrize("one", PROBLEMS, ids=lambda one: f"{one.operator}-{one.m}")
def test_the_launcher_has_a_kernel_for_every_candidate(one: Problem) -> None:
    plans = plans_of(one)
    assert len(plans) >= 10
    with lone_group() as group:
        measurer = KernelMeasurer(maker=Maker(group=group), max_grid=MAX_GRID, sample=run_each)
        call = measurer._calls(one)[0]
        for plan in plans:
            config = measurer._kernel(call, plan)
            assert config is None or (config.block_m, config.block_n) == (plan.tile.rows, plan.tile.columns)
            assert (config is None) == (plan.variant == "library")
            assert config is None or config.split == plan.split


@pytest.mark.parametrize("one", PROBLEMS, ids=lambda one: f"{one.operator}-{one.m}")
def test_every_candidate_is_launched_as_its_plan_says(
    one: Problem, fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[KernelConfig] = []
    monkeypatch.setattr(measure, "compile_kernel", compiled.append)
    plans = [plan for plan in plans_of(one) if plan.variant != "library"]
    platform = FakePlatform(num_sms=MAX_GRID + RESERVE)
    with lone_group() as group:
        measurer = KernelMeasurer(maker=Maker(group=group), max_grid=MAX_GRID, sample=run_each, platform=platform)
        measurer.ahead([(one, plan) for plan in plans])
        ahead = set(compiled)
        for plan in plans:
            fake_driver.grids.clear()
            run = measurer.prepare(one, plan)
            assert run() >= 1, plan
            grid = plan.roles.compute if plan.variant == "stream" else plan.grid
            exact = plan.operator != "all_gather_gemm"  # all of its blocks move rows
            assert all(launched == grid if exact else launched <= MAX_GRID for launched in fake_driver.grids), plan
    assert set(platform.loaded) == set(compiled), "what is launched was made ready before"
    assert ahead and ahead <= set(compiled)


def test_a_plan_without_a_kernel_is_refused_by_name() -> None:
    one = PROBLEMS[4]
    site = Site(problem=one, topology=preset("2xh200"), reserve_sms=RESERVE)
    plan = replace(next(iter(candidates(site))).plan, variant="unheard_of")
    with lone_group() as group:
        measurer = KernelMeasurer(maker=Maker(group=group), max_grid=MAX_GRID, sample=run_each)
        with pytest.raises(UnsupportedDeviceError, match="all_gather_gemm/unheard_of"):
            measurer.prepare(one, plan)


def test_long_calls_are_timed_less_often_and_every_rank_alike() -> None:
    assert num_calls(problem("gemm_all_reduce", 32768, 32768, 4096)) == 3
    assert num_calls(problem("gemm_all_reduce", 16, 4096, 4096)) == 20
