"""Ranks that do not launch the same thing get an error that names them, and never hang."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from mkcompile.errors import GroupError, PlanMismatchError
from mkcompile.ops.gemm_all_reduce import GemmAllReduce
from mkcompile.runtime.agree import Agreement
from mkcompile.runtime.dispatch import Dispatch
from tests.spawn import Outcomes, run_cases

WORLD = 3


def same_plans(rank: int, world_size: int) -> list[bool]:
    agreement = Agreement()
    before = agreement.holds("0", "a")
    agreement.reach("0", "a", "plan a")
    agreement.reach("0", "b", "plan b")
    return [before, agreement.holds("0", "a"), agreement.holds("0", "b"), agreement.holds("0", "c")]


def one_differs(rank: int, world_size: int) -> str:
    agreement = Agreement(timeout_s=20.0)
    agreement.reach("0", "a", "plan a")
    with pytest.raises(PlanMismatchError) as caught:
        agreement.reach("0", "b", "m=64" if rank == 1 else "m=128")
    return str(caught.value)


def one_never_comes(rank: int, world_size: int) -> str:
    store = _get_process_group_store(dist.group.WORLD)
    if rank == 2:
        store.wait(["0 is done", "1 is done"])
        return ""
    with pytest.raises(PlanMismatchError) as caught:
        Agreement(timeout_s=1.0).reach("0", "a", "plan a")
    store.set(f"{rank} is done", "")
    return str(caught.value)


def late_rank_is_waited_for(rank: int, world_size: int) -> bool:
    store = _get_process_group_store(dist.group.WORLD)
    if rank == 0:
        store.wait(["1 is asking"])
    if rank == 1:
        store.set("1 is asking", "")
    agreement = Agreement(timeout_s=20.0)
    agreement.reach("0", "a", "plan a")
    return agreement.holds("0", "a")


def orders_differ(rank: int, world_size: int) -> str:
    agreement = Agreement(timeout_s=20.0)
    with pytest.raises(PlanMismatchError) as caught:
        for plan in ("ab", "ba")[rank == 0]:
            agreement.reach("0", plan, f"plan {plan}")
    return str(caught.value)


def sub_groups_do_not_mix(rank: int, world_size: int) -> str:
    pair = dist.new_group([0, 2])
    agreement = Agreement(timeout_s=20.0)
    if rank == 1:
        return ""
    agreement.reach(pair.group_name, "a", "plan a")
    with pytest.raises(PlanMismatchError) as caught:
        agreement.reach(pair.group_name, "b", f"plan of {rank}")
    return str(caught.value)


def new_group_of_the_same_name_is_asked_again(rank: int, world_size: int) -> list[bool]:
    # the file store outlives the groups, and so does what the first life wrote into it
    agreement = Agreement(timeout_s=20.0)
    store = _get_process_group_store(dist.group.WORLD).underlying_store
    agreement.reach("0", "a", "first life")
    before = agreement.holds("0", "a")
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=world_size)
    after = agreement.holds("0", "a")
    agreement.reach("0", "a", "second life")
    return [before, after, agreement.holds("0", "a")]


def store_does_not_grow(rank: int, world_size: int) -> int:
    agreement = Agreement(timeout_s=20.0)
    agreement.reach("0", 0, "plan")
    dist.barrier()
    before = _get_process_group_store(dist.group.WORLD).num_keys()
    for number in range(1, 6):
        agreement.reach("0", number, "plan")
    dist.barrier()
    return _get_process_group_store(dist.group.WORLD).num_keys() - before


def group_timeout_is_the_deadline(rank: int, world_size: int) -> float:
    from datetime import timedelta

    short = dist.new_group()  # its ranks find each other by a longer one, on a loaded machine too
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1.5), short)
    if rank > 0:
        return 1.5
    started = time.monotonic()
    with pytest.raises(PlanMismatchError):
        Agreement().reach(short.group_name, "a", "plan a")
    return time.monotonic() - started


def steady_state_cost_us(rank: int, world_size: int) -> float:
    agreement = Agreement()
    signature = ("operator=gemm_all_reduce,n=4096,k=4096", torch.Size([8192, 4096]))
    agreement.reach("0", signature, "plan a")
    times = []
    for _ in range(50):
        started = time.perf_counter()
        for _ in range(100):
            agreement.holds("0", signature)
        times.append((time.perf_counter() - started) / 100)
    return statistics.median(times) * 1e6


CASES = {
    case.__name__: case
    for case in (
        same_plans,
        one_differs,
        one_never_comes,
        late_rank_is_waited_for,
        orders_differ,
        sub_groups_do_not_mix,
        new_group_of_the_same_name_is_asked_again,
        store_does_not_grow,
        group_timeout_is_the_deadline,
        steady_state_cost_us,
    )
}


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return run_cases(CASES, WORLD, timeout_s=120.0)


def test_same_plans_are_agreed_on_and_remembered(outcomes: Outcomes) -> None:
    assert outcomes.values("same_plans") == [[False, True, True, False]] * WORLD


def test_every_rank_is_told_who_differs_and_how(outcomes: Outcomes) -> None:
    first, second, third = outcomes.values("one_differs")
    assert "rank 0 (this one): m=128" in first and "rank 1: m=64" in first and "rank 2" not in first
    assert "rank 1 (this one): m=64" in second and "rank 0: m=128" in second and "rank 2: m=128" in second
    assert "rank 1: m=64" in third
    assert max(outcomes.seconds("one_differs")) < 15.0


def test_a_rank_that_never_comes_is_named_at_the_deadline(outcomes: Outcomes) -> None:
    for rank in (0, 1):
        message = outcomes.values("one_never_comes")[rank]
        assert "rank 2: did not come within" in message and f"rank {1 - rank}:" not in message


def test_a_late_rank_is_waited_for(outcomes: Outcomes) -> None:
    assert outcomes.values("late_rank_is_waited_for") == [True] * WORLD


def test_new_plans_in_another_order_are_found(outcomes: Outcomes) -> None:
    assert "rank 0: plan b" in outcomes.values("orders_differ")[1]


def test_sub_groups_agree_among_themselves_and_errors_name_global_ranks(outcomes: Outcomes) -> None:
    first, _, third = outcomes.values("sub_groups_do_not_mix")
    assert "rank 2: plan of 2" in first and "rank 0: plan of 0" in third


def test_a_new_group_of_the_same_name_is_asked_again(outcomes: Outcomes) -> None:
    assert outcomes.values("new_group_of_the_same_name_is_asked_again") == [[True, False, True]] * WORLD


def test_the_store_keeps_only_the_last_plan(outcomes: Outcomes) -> None:
    assert max(outcomes.values("store_does_not_grow")) <= 0


def test_the_deadline_is_the_groups_own_timeout(outcomes: Outcomes) -> None:
    assert 1.4 < outcomes.values("group_timeout_is_the_deadline")[0] < 6.0


def test_steady_state_is_a_set_lookup(outcomes: Outcomes) -> None:
    # about 1 us alone; the bound leaves room for a loaded machine, and none for a trip to the store
    assert max(outcomes.values("steady_state_cost_us")) < 10.0


def test_a_call_whose_group_is_gone_or_another_says_what_to_do() -> None:
    from tests.runtime.fakes import lone_group  # it reads the settings, which ranks must not have done

    x, w = torch.ones(16, 8), torch.ones(8, 16)
    dispatch = Dispatch(Agreement())
    with lone_group(world_size=2) as name:
        call = GemmAllReduce([x], [w], None, "sum", 2, name, "always;compiled")
        assert dispatch(call) is None and dispatch(call) is None
    with pytest.raises(GroupError, match="init_process_group first"):
        dispatch(call)
    with lone_group(world_size=4), pytest.raises(GroupError, match=r"has 4 ranks, .* compiled again"):
        dispatch(call)
