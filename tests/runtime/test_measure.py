"""Every plan that the planner may make for this machine's launcher can be launched and timed."""

from __future__ import annotations

import pytest

from mkcompile.errors import UnsupportedDeviceError
from mkcompile.ops.problem import Problem
from mkcompile.plan.candidates import Site, candidates
from mkcompile.plan.decide import Policy
from mkcompile.plan.reference import Maker
from mkcompile.plan.topology import preset
from mkcompile.runtime.measure import KernelMeasurer, num_calls
from mkcompile.runtime.tactics import AVAILABLE
from tests.plan.problems import problem
from tests.runtime.fakes import lone_group

MAX_GRID = 128
PROBLEMS = [
    problem("gemm_all_reduce", 64, 512, 256),
    problem("gemm_all_reduce", 1024, 1024, 64, has_bias=True),
    problem("gemm_reduce_scatter", 256, 512, 128, outer=2),
    problem("gemm_reduce_scatter", 64, 512, 256, weight_layout="kn"),
    problem("all_gather_gemm", 1024, 512, 64),
    problem("all_gather_gemm", 256, 512, 64, num_gemms=2, returns_gathered=True),
]


@pytest.mark.parametrize("one", PROBLEMS, ids=lambda one: f"{one.operator}-{one.m}")
def test_the_launcher_has_a_kernel_for_every_candidate(one: Problem) -> None:
    policy = Policy(fuse="always", reserve_sms=4, available=AVAILABLE)
    site = Site(problem=one, topology=preset("2xh200"), reserve_sms=4)
    plans = [candidate.plan for candidate in candidates(site) if policy.allows(candidate.plan)]
    assert len(plans) >= 10
    with lone_group() as group:
        measurer = KernelMeasurer(maker=Maker(group=group), max_grid=MAX_GRID)
        call = measurer._calls(one)[0]
        for plan in plans:
            config = measurer._kernel(call, plan)
            assert config is None or (config.block_m, config.block_n) == (plan.tile.rows, plan.tile.columns)
            assert (config is None) == (plan.variant == "library")
            assert config is None or config.split == plan.split


def test_a_plan_without_a_kernel_is_refused_by_name() -> None:
    one = PROBLEMS[4]
    site = Site(problem=one, topology=preset("2xh200"), reserve_sms=4)
    plan = next(candidate.plan for candidate in candidates(site) if candidate.plan.variant == "remote_read")
    with lone_group() as group:
        measurer = KernelMeasurer(maker=Maker(group=group), max_grid=MAX_GRID)
        with pytest.raises(UnsupportedDeviceError, match="all_gather_gemm/remote_read"):
            measurer.prepare(one, plan)


def test_long_calls_are_timed_less_often_and_every_rank_alike() -> None:
    assert num_calls(problem("gemm_all_reduce", 32768, 32768, 4096)) == 3
    assert num_calls(problem("gemm_all_reduce", 16, 4096, 4096)) == 20
