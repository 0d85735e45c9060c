"""The multi-process helper itself: values, errors, hangs and isolation between cases."""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed as dist

from tests.spawn import run_case, run_cases


def sum_of_ranks(rank: int, world_size: int) -> float:
    x = torch.tensor([float(rank + 1)])
    dist.all_reduce(x)
    return x.item()


def raises_on_one(rank: int, world_size: int) -> str:
    if rank == 1:
        raise ValueError("rank one is unhappy")
    return "fine"


def dies_on_one(rank: int, world_size: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def waits_for_ever(rank: int, world_size: int) -> None:
    signal.pause()


def test_one_spawn_runs_every_case_on_a_fresh_group() -> None:
    outcomes = run_cases({"sum": sum_of_ranks, "raises": raises_on_one, "again": sum_of_ranks}, 2)
    assert outcomes.values("sum") == outcomes.values("again") == [3.0, 3.0]
    first, second = outcomes.errors("raises")
    assert first is None
    assert second is not None
    assert (second.kind, second.message) == ("ValueError", "rank one is unhappy")


def age_of_group(rank: int, world_size: int) -> int:
    """1 for a new group, 2 for one that a case has had before."""
    group = dist.group.WORLD
    return dist.distributed_c10d._get_process_group_store(group).add(f"cases of rank {rank}", 1)


def test_cases_may_share_a_group_until_one_fails() -> None:
    cases = {"first": age_of_group, "second": age_of_group, "raises": raises_on_one}
    outcomes = run_cases({**cases, "after": age_of_group, "sum": sum_of_ranks}, 2, one_group=True)
    ages = [outcomes.values(name) for name in ("first", "second", "after")]
    assert ages == [[1, 1], [2, 2], [1, 1]]
    assert outcomes.values("sum") == [3.0, 3.0]


def test_a_dead_rank_and_a_hang_are_reported() -> None:
    dead = run_cases({"dies": dies_on_one}, 2).errors("dies")
    assert dead[0] is None and dead[1] is not None and "exit code -9" in dead[1].message
    hung = run_cases({"hang": waits_for_ever}, 1, timeout_s=6.0).errors("hang")
    assert hung[0] is not None and "6.0 s were given" in hung[0].message and "waits_for_ever" in hung[0].traceback


def test_a_failed_rank_fails_the_case() -> None:
    try:
        run_case(raises_on_one, 2)
    except AssertionError as error:
        assert "rank one is unhappy" in str(error)
    else:
        raise AssertionError("the case should have failed")
