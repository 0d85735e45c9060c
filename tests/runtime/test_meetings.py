"""While ranks of a group are waited for, other threads launch on other groups, in order with all that is launched."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mkcompile.ops.all_gather_gemm import AllGatherGemm
from mkcompile.ops.gemm_all_reduce import GemmAllReduce
from mkcompile.plan import key
from mkcompile.runtime.exchange import Exchange
from mkcompile.runtime.launcher import Launcher
from mkcompile.runtime.machine import own_basis
from mkcompile.runtime.probe import Survey
from mkcompile.runtime.tactics import Planned
from tests.runtime.conftest import PANELS
from tests.runtime.fakes import FakeDriver, FakePlatform, lone_group
from tests.runtime.test_launcher import all_reduce, tensor


def test_a_group_whose_ranks_are_waited_for_holds_up_no_other(
    platform: FakePlatform, fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, may_come = threading.Event(), threading.Event()
    survey = platform.survey

    def late_survey(exchange: Exchange, device: torch.device) -> Survey:
        if exchange.group() is dist.group.WORLD:
            waits.set()
            assert may_come.wait(timeout=20), "the other group was not decided meanwhile"
        return survey(exchange, device)

    monkeypatch.setattr(platform, "survey", late_survey)
    with lone_group(), ThreadPoolExecutor() as threads:
        launcher, other = Launcher(platform), dist.new_group([0, 1])
        late = threads.submit(launcher, all_reduce())
        assert waits.wait(timeout=20)
        assert launcher(all_reduce(group=other.group_name)) is not None
        may_come.set()
        assert late.result(timeout=20) is not None


def planned(name: str, **changes: Any) -> GemmAllReduce:
    return all_reduce(group=name, plan_key=key.with_facts("always;a problem", [key.ALONE, key.STAYS]), **changes)


def gathered(name: str) -> AllGatherGemm:
    return AllGatherGemm(tensor(4096, 1024), [tensor(512, 1024).t()], [None], [0], 0, False, 2, name, "key")


@pytest.mark.parametrize(
    ("step", "call"),
    [("workspace", lambda name: all_reduce(group=name)), ("results", planned), ("gathered rows", gathered)],
)
def test_memory_that_is_made_for_one_group_holds_up_no_launch_of_another(
    platform: FakePlatform, fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, step: str, call: Any
) -> None:
    """And what that launches meanwhile, in another stream, comes before."""
    waits, may_come = threading.Event(), threading.Event()

    def gather(exchange: Exchange, said: str, value: str) -> tuple[str, ...]:
        if exchange.group() is dist.group.WORLD and said.startswith(step) and not waits.is_set():
            waits.set()
            assert may_come.wait(timeout=20), "the other group was not launched meanwhile"
        return (value,) * exchange.world_size

    kernels = PANELS - {"all_gather_gemm/push", "all_gather_gemm/remote_read", "all_gather_gemm/pull"}
    with lone_group(), ThreadPoolExecutor() as threads:
        launcher, other = Launcher(platform, Planned(own_basis, available=kernels)), dist.new_group([0, 1])
        monkeypatch.setattr(Exchange, "gather", gather)
        late = threads.submit(launcher, call("0"))
        assert waits.wait(timeout=20)
        platform.stream = 9
        assert launcher(all_reduce(group=other.group_name)) is not None
        assert launcher._resources.devices[torch.device("cpu")].chain.has_events
        platform.fake_streams.log.clear()
        may_come.set()
        assert late.result(timeout=20) is not None
        assert platform.fake_streams.log[0].startswith("7 waits ")


def test_a_workspace_that_was_replaced_meanwhile_is_not_launched_on(
    platform: FakePlatform, fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call waits for memory of its results while another thread has the workspace grow."""
    waits, may_come = threading.Event(), threading.Event()

    def gather(exchange: Exchange, said: str, value: str) -> tuple[str, ...]:
        if said.startswith("results") and not waits.is_set():
            waits.set()
            assert may_come.wait(timeout=20)
        return (value,) * exchange.world_size

    with lone_group(), ThreadPoolExecutor() as threads:
        launcher = Launcher(platform, Planned(own_basis, available=PANELS))
        launcher(planned("0"))
        workspace = launcher._resources.groups["0", torch.device("cpu")].workspace
        first = workspace.current
        assert first is not None
        first.results._limit_bytes, grown = 1 << 30, planned("0", m=65536)
        monkeypatch.setattr(Exchange, "gather", gather)
        late = threads.submit(launcher, planned("0", m=32768))  # 32 MiB of results
        assert waits.wait(timeout=20)
        workspace.exchange.meeting = threading.RLock()  # as if the other thread had been there before
        other = threads.submit(launcher, replace(grown, plan_key="key"))
        assert other.result(timeout=20) is not None
        assert workspace.current is not first
        may_come.set()
        assert late.result(timeout=20) is not None
        assert all(one.workspace is workspace.current for one in launcher._operations.values() if one.form.size.m > 256)  # type: ignore[union-attr]
