"""How many SMs a launch leaves: few only where nothing of NCCL can come beside it, and the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mkcompile.config import read_settings
from mkcompile.errors import OptionError
from mkcompile.ops.all_gather_gemm import AllGatherGemm
from mkcompile.ops.gemm_all_reduce import GemmAllReduce
from mkcompile.plan import key
from mkcompile.plan.kernels import AVAILABLE
from mkcompile.plan.plan import Plan, Roles, Tile
from mkcompile.runtime import machine, reserve
from mkcompile.runtime.abi import MAX_WORLD
from mkcompile.runtime.exchange import Exchange
from mkcompile.runtime.launcher import Launcher
from mkcompile.runtime.machine import own_basis, policy_of
from mkcompile.runtime.tactics import Given, Planned
from tests.runtime.conftest import PANELS
from tests.runtime.fakes import FakeDriver, FakePlatform, lone_group

PROBLEM = "always;a problem"
ALONE = key.with_facts(PROBLEM, [key.ALONE])
FEW, MANY = 4, 16
Said = Callable[[str], tuple[str, ...]]


def as_this_rank(own: str) -> tuple[str, ...]:
    return (own, own)


def reserve_of(patch: pytest.MonkeyPatch, said: Said = as_this_rank, group: Any = None) -> reserve.Reserve:
    patch.setattr(Exchange, "gather", lambda self, step, value: said(value))
    return reserve.of_group(Exchange(group or dist.group.WORLD, "test"))


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    with lone_group(4):
        yield monkeypatch


def test_few_only_for_calls_that_the_graph_shows_to_be_alone(patch: pytest.MonkeyPatch) -> None:
    found = reserve_of(patch)
    assert [found.sms(plan_key) for plan_key in (ALONE, PROBLEM, "", "by hand")] == [FEW, MANY, MANY, MANY]


def test_groups_of_the_same_ranks_are_no_data_parallelism(patch: pytest.MonkeyPatch) -> None:
    dist.new_group([0, 1, 2, 3])
    dist.new_group([0])
    assert reserve_of(patch).sms(ALONE) == FEW


def test_a_group_of_other_ranks_may_have_hooks(patch: pytest.MonkeyPatch) -> None:
    fused = dist.new_group([0, 1])
    assert reserve_of(patch, group=fused).sms(ALONE) == MANY
    patch.setattr(dist, "get_backend", lambda group: dist.Backend.GLOO)
    assert reserve_of(patch, group=fused).sms(ALONE) == FEW, "which do not use the GPU over gloo"


def test_one_rank_with_such_a_group_is_enough(patch: pytest.MonkeyPatch) -> None:
    assert reserve_of(patch, lambda own: (own, "1 0")).sms(ALONE) == MANY


def test_the_number_of_the_user_goes_before_ours(patch: pytest.MonkeyPatch) -> None:
    given = reserve_of(patch, lambda own: (own, "0 1"))
    assert [given.sms(plan_key) for plan_key in (ALONE, PROBLEM, "")] == [MANY] * 3, "16 is what the settings here say"


def test_settings_know_whether_the_number_was_given() -> None:
    assert not read_settings({}).is_sm_reserve_given
    assert read_settings({"MKCOMPILE_SM_RESERVE": "16"}).is_sm_reserve_given
    with pytest.raises(OptionError, match="unknown setting"):
        read_settings({"MKCOMPILE_IS_SM_RESERVE_GIVEN": "1"})


def test_launches_shrink_when_a_group_of_other_ranks_is_made(platform: FakePlatform, fake_driver: FakeDriver) -> None:
    x, w = torch.ones(8192, 64, dtype=torch.bfloat16), torch.ones(8192, 64, dtype=torch.bfloat16).t()
    call = GemmAllReduce([x], [w], None, "sum", 2, "", ALONE)
    with lone_group(4):
        call = replace(call, group=dist.new_group([0, 1]).group_name)
        platform._num_sms = 132
        spare = dist.new_group([0, 3])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reserve, "has_traffic_beside", lambda group: False)
            launcher = Launcher(platform)
            launcher(call)
            launcher(replace(call, plan_key=PROBLEM))
        alone, beside = fake_driver.grids
        assert beside <= 132 - MANY < alone <= 132 - FEW
        dist.destroy_process_group(spare)
        dist.new_group([0, 2])  # as many groups as before
        launcher(call)
        launcher(replace(call, x=[x[:4096]]))  # a size that comes only now
    assert fake_driver.grids[-2] == 132 - MANY >= fake_driver.grids[-1]
    first, _, last, _ = fake_driver.launches
    assert (first.identity, first.lag) == (last.identity, last.lag), "grids may differ by rank, nothing else"


def test_gathers_shrink_too(platform: FakePlatform, fake_driver: FakeDriver) -> None:
    x, w = torch.ones(8192, 64, dtype=torch.bfloat16), torch.ones(8192, 64, dtype=torch.bfloat16).t()
    call = AllGatherGemm(x, [w], [None], [0], 0, False, 2, "", ALONE)
    with lone_group(4):
        call = replace(call, group=dist.new_group([0, 1]).group_name)
        platform._num_sms = 132
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reserve, "has_traffic_beside", lambda group: False)
            launcher = Launcher(platform, Planned(own_basis, available=frozenset({"all_gather_gemm/push"})))
            launcher(call)
        dist.new_group([0, 2])
        for _ in range(2):
            launcher(call)
    assert fake_driver.grids == [132 - FEW, 132 - MANY, 132 - MANY]
    first, last, _ = fake_driver.launches
    assert first.identity == last.identity, "grids may differ by rank, nothing else"


def test_gathers_whose_blocks_fetch_keep_their_grid(platform: FakePlatform, fake_driver: FakeDriver) -> None:
    x, w = torch.ones(8192, 64, dtype=torch.bfloat16), torch.ones(8192, 64, dtype=torch.bfloat16).t()
    tile = Tile(rows=128, columns=128)
    plan = Plan(
        operator="all_gather_gemm",
        variant="pull",
        world_size=2,
        tile=tile,
        stages=4,
        roles=Roles(compute=128),
        transport="load",
    )
    with lone_group(4):
        call = AllGatherGemm(x, [w], [None], [0], 0, False, 2, dist.new_group([0, 1]).group_name, ALONE)
        platform._num_sms = 132
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reserve, "has_traffic_beside", lambda group: False)
            launcher = Launcher(platform, Given({ALONE: plan}))
            launcher(call)
        dist.new_group([0, 2])
        launcher(call)
    assert fake_driver.grids == [132 - FEW] * 2


@pytest.mark.parametrize("kind", [GemmAllReduce, AllGatherGemm])
def test_grids_shrink_under_the_lock_of_the_device(kind: type, platform: FakePlatform, fake_driver: FakeDriver) -> None:
    """Another thread may launch what is forgotten."""
    x, w = torch.ones(256, 64, dtype=torch.bfloat16), torch.ones(512, 64, dtype=torch.bfloat16).t()
    with lone_group():
        launcher = Launcher(platform, Planned(own_basis, available=PANELS))
        if kind is GemmAllReduce:
            launcher(GemmAllReduce([x], [w], None, "sum", 2, "0", ALONE))
        else:
            launcher(AllGatherGemm(x, [w], [None], [0], 0, False, 2, "0", ALONE))
        operation: Any = next(iter(launcher._operations.values()))
        group, held = operation.process_group(), list[bool]()

        def seen() -> Any:
            held.append(operation.device.lock.locked())
            return group

        operation.process_group = seen
        dist.new_group([0])
        operation.run(x if kind is AllGatherGemm else [x], [w], [None] if kind is AllGatherGemm else None)
    assert held == [True] and len(fake_driver.grids) == 2


def test_sites_are_judged_by_what_most_compiled_graphs_leave() -> None:
    assert policy_of().reserve_sms == FEW


def test_sites_are_refused_where_launches_would_be() -> None:
    assert policy_of().max_ranks == MAX_WORLD


def test_what_blocking_launches_cannot_run_is_not_counted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = {"all_gather_gemm/copy_engine", "all_gather_gemm/library"}
    assert policy_of().available == AVAILABLE and engines < AVAILABLE
    monkeypatch.setattr(machine, "settings", lambda: read_settings({"CUDA_LAUNCH_BLOCKING": "1"}))
    assert policy_of().available == AVAILABLE - engines
