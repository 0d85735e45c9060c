"""Ranks that meet in the store: values, deadlines, ranks that are late, dead or at another step."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mkcompile.errors import PeerTimeoutError, UnsupportedDeviceError, WorkspaceError
from mkcompile.ops.gemm_all_reduce import GemmAllReduce
from mkcompile.ops.groups import find
from mkcompile.runtime import driver
from mkcompile.runtime.exchange import Exchange, group_timeout_s
from mkcompile.runtime.launcher import Launcher
from mkcompile.runtime.machine import own_basis
from mkcompile.runtime.operation import Operation
from mkcompile.runtime.symmetric import make_buffer
from mkcompile.runtime.tactics import Planned
from tests.runtime.conftest import PANELS
from tests.runtime.fakes import FakeBacking, FakeDriver, FakePlatform
from tests.spawn import Outcomes, run_cases

SHORT_S = 1.0
LONG_S = 20.0


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def meet(name: str) -> None:
    """All ranks are here, by another way than the one under test."""
    dist.barrier()


def values_case(rank: int, world_size: int) -> list[tuple[str, ...]]:
    exchange = Exchange(world(), "test", LONG_S)
    return [exchange.gather(f"step {i}", f"{i}:{rank}") for i in range(5)]


def group_timeout_case(rank: int, world_size: int) -> float:
    return group_timeout_s(world())


def missing_case(rank: int, world_size: int) -> dict[str, Any]:
    """Ranks 0 and 2 come, rank 1 does not; then all come."""
    exchange = Exchange(world(), "test", SHORT_S)
    error = None
    if rank != 1:
        with pytest.raises(PeerTimeoutError) as caught:
            exchange.gather("a workspace", "")
        error = (caught.value.report.peer, caught.value.report.rank, str(caught.value))
    meet("after the deadline")
    exchange.timeout_s = LONG_S
    return {"error": error, "then": exchange.gather("a workspace", str(rank))}


def late_case(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 1 comes after rank 0 has given up: it must not go on alone; at the next try both are together again."""
    exchange = Exchange(world(), "test", SHORT_S)
    errors = 0
    if rank == 1:
        meet("rank 0 has given up")
    try:
        exchange.gather("a", "")
    except PeerTimeoutError:
        errors += 1
    if rank == 0:
        meet("rank 0 has given up")
    meet("both have given up")
    exchange.timeout_s = LONG_S
    return {"errors": errors, "then": exchange.gather("a", str(rank))}


def apart_case(rank: int, world_size: int) -> dict[str, Any]:
    exchange = Exchange(world(), "test", LONG_S)
    with pytest.raises(WorkspaceError) as caught:
        exchange.gather("a" if rank == 0 else "b", "")
    return {"error": str(caught.value), "then": exchange.gather("c", str(rank))}


def reborn_case(rank: int, world_size: int) -> list[tuple[str, ...]]:
    """A second exchange on the same store does not see what the first was told."""
    return [Exchange(world(), "test", LONG_S).gather("a", f"{life}:{rank}") for life in range(2)]


def buffer_case(rank: int, world_size: int) -> dict[str, Any]:
    """One rank can't allocate, then one can't map, then all can."""
    exchange = Exchange(world(), "test", LONG_S)
    backing = FakeBacking(world_size)
    errors = []
    backing.allocation_failure = "out of memory" if rank == 1 else ""
    with pytest.raises(WorkspaceError) as first:
        make_buffer(exchange, backing, "w", 1024, 512)
    errors.append(str(first.value))
    backing.allocation_failure, backing.null_peer = "", 1 if rank == 0 else -1
    with pytest.raises(UnsupportedDeviceError) as second:
        make_buffer(exchange, backing, "w", 1024, 512)
    errors.append(str(second.value))
    backing.null_peer = -1
    return {"errors": errors, "then": make_buffer(exchange, backing, "w", 1024, 512).addresses}


def opposite_case(rank: int, world_size: int) -> list[str]:
    """Two threads of each rank come to two groups, in opposite order: each thread waits for the other rank while the
    other thread of its own is to go on.
    """
    names = [dist.new_group(timeout=timedelta(seconds=LONG_S)).group_name for _ in range(2)]
    first, second = names if rank == 0 else reversed(names)
    waits, gather, run, fake = threading.Event(), Exchange.gather, Operation.run, FakeDriver()

    def seen(exchange: Exchange, step: str, value: str) -> tuple[str, ...]:
        if step.startswith("workspace"):
            waits.set()
        return gather(exchange, step, value)

    def in_order(operation: Operation, *operands: Any) -> torch.Tensor | None:
        assert operation.process_group() is not find(second) or waits.wait(LONG_S)
        return run(operation, *operands)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as threads:
        patch.setattr(driver, "library", lambda: fake)
        patch.setattr(Exchange, "gather", seen)
        patch.setattr(Operation, "run", in_order)
        launcher = Launcher(FakePlatform(world_size), Planned(own_basis, available=PANELS))
        made = [threads.submit(launcher, call_over(name)) for name in (first, second)]
        return [str(tuple(one.result(LONG_S).shape)) for one in made]


def call_over(group: str) -> GemmAllReduce:
    x, w = torch.ones(256, 64, dtype=torch.bfloat16), torch.ones(512, 64, dtype=torch.bfloat16).t()
    return GemmAllReduce([x], [w], None, "sum", 2, group, "key")


def killed_case(rank: int, world_size: int) -> tuple[float, str]:
    """Rank 1 is killed on its way to the handshake; the last case, since it leaves no rank 1."""
    exchange = Exchange(world(), "test", SHORT_S)
    meet("both are alive")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(PeerTimeoutError) as caught:
        make_buffer(exchange, FakeBacking(world_size), "a workspace", 1024, 0)
    return time.monotonic() - started, str(caught.value)


CASES = {
    "values": values_case,
    "timeout": group_timeout_case,
    "missing": missing_case,
    "late": late_case,
    "apart": apart_case,
    "reborn": reborn_case,
    "buffer": buffer_case,
    "opposite": opposite_case,
    "killed": killed_case,
}


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    two = {name: case for name, case in CASES.items() if name != "missing"}
    groups = [run_cases(two, 2, group_timeout_s=30), run_cases({"missing": missing_case}, 3, group_timeout_s=30)]
    return Outcomes({name: results for group in groups for name, results in group.by_case.items()})


def test_every_rank_gets_every_value_in_rank_order(outcomes: Outcomes) -> None:
    assert outcomes.values("values") == [[(f"{i}:0", f"{i}:1") for i in range(5)]] * 2


def test_the_deadline_is_the_groups_own(outcomes: Outcomes) -> None:
    assert outcomes.values("timeout") == [30.0, 30.0]


def test_a_rank_that_does_not_come_is_named(outcomes: Outcomes) -> None:
    first, absent, last = outcomes.values("missing")
    assert absent["error"] is None
    for rank, seen in ((0, first), (2, last)):
        peer, who, text = seen["error"]
        assert who == rank and peer == 1
        assert "a workspace" in text and "which did not come" in text
    assert first["then"] == absent["then"] == last["then"] == ("0", "1", "2")


def test_a_late_rank_does_not_go_on_alone(outcomes: Outcomes) -> None:
    first, late = outcomes.values("late")
    assert (first["errors"], late["errors"]) == (1, 1)
    assert first["then"] == late["then"] == ("0", "1")


def test_ranks_at_different_steps_say_so_and_meet_again(outcomes: Outcomes) -> None:
    first, second = outcomes.values("apart")
    assert "0 for 'a', 1 for 'b'" in first["error"] and "1 for 'b', 0 for 'a'" in second["error"]
    assert first["then"] == second["then"] == ("0", "1")


def test_each_life_of_a_group_counts_by_itself(outcomes: Outcomes) -> None:
    assert outcomes.values("reborn") == [[("0:0", "0:1"), ("1:0", "1:1")]] * 2


def test_memory_is_had_by_all_ranks_or_by_none(outcomes: Outcomes) -> None:
    for seen in outcomes.values("buffer"):
        assert seen["errors"][0] == "symmetric memory: rank 1: out of memory"
        assert seen["errors"][1] == "symmetric memory: rank 0: no mapping of the memory of rank 1"
        assert seen["then"] == (1 << 40, 2 << 40)


def test_two_groups_that_are_met_in_opposite_order_hold_each_other_up_nowhere(outcomes: Outcomes) -> None:
    assert outcomes.values("opposite") == [["(256, 512)"] * 2] * 2


def test_a_killed_rank_is_an_error_within_the_deadline(outcomes: Outcomes) -> None:
    survivor = outcomes.by_case["killed"][0]
    assert survivor.error is None, survivor.error
    waited_s, text = survivor.value
    assert waited_s < SHORT_S + 5 and "rank 1" in text
