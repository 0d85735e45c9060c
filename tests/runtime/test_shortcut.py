"""Operator calls like earlier ones: what the short way still sees, and how little Python it runs."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mkcompile.errors import GroupError, OperatorInputError, PeerTimeoutError
from mkcompile.ops import registry
from mkcompile.ops.gemm_all_reduce import GemmAllReduce
from mkcompile.ops.registry import Call, set_launcher
from mkcompile.runtime import abi
from mkcompile.runtime.agree import Agreement
from mkcompile.runtime.dispatch import Dispatch
from mkcompile.runtime.launcher import Launcher
from mkcompile.runtime.machine import own_basis
from mkcompile.runtime.tactics import Planned
from tests.runtime.conftest import PANELS
from tests.runtime.fakes import FakeDriver, FakePlatform, lone_group

TESTS = str(Path(__file__).parent)
# Python functions of a call, torch's own and no fakes counted: each costs the host about 0.1 us.
MOST_FUNCTIONS = 12


class CountedLauncher(Launcher):
    """Counts the calls that come the long way."""

    long_calls = 0

    def __call__(self, call: Call) -> Any:
        self.long_calls += 1
        return super().__call__(call)


@pytest.fixture
def counted(platform: FakePlatform, fake_driver: FakeDriver) -> Iterator[CountedLauncher]:
    tactics = Planned(own_basis, available=PANELS)
    launcher, before = CountedLauncher(platform, tactics), registry._REGISTRY.launcher
    with lone_group():
        set_launcher(Dispatch(Agreement(), launcher))
        try:
            yield launcher
        finally:
            set_launcher(before)


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def all_reduce(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, key: str = "key") -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkcompile.gemm_all_reduce.default([x], [w], bias, "sum", 2, "0", key)
    return out


def reduce_scatter(x: torch.Tensor, w: torch.Tensor, shape: list[int], dim: int = 0) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkcompile.gemm_reduce_scatter.default([x], [w], None, shape, dim, "sum", 2, "0", "k")
    return out


def python_functions(run: Callable[[], object]) -> list[str]:
    """The functions of the package and of torch that it calls."""
    names: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and not frame.f_code.co_filename.startswith(TESTS):
            names.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return names


@pytest.mark.parametrize("operator", ["gemm_all_reduce", "gemm_reduce_scatter"])
def test_a_call_like_an_earlier_one_runs_few_python_functions(counted: CountedLauncher, operator: str) -> None:
    """Also where operands alternate; the least of some, as the result may lie where none has been before."""
    xs, w = [tensor(256, 64), tensor(256, 64)], tensor(512, 64).t()

    def call(x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x, w) if operator == "gemm_all_reduce" else reduce_scatter(x, w, [256, 512])

    first = python_functions(lambda: call(xs[0]))
    for x in xs * 2:
        later = min((python_functions(lambda: call(x)) for _ in range(10)), key=len)  # noqa: B023 (called at once)
    assert len(later) <= MOST_FUNCTIONS < len(first) / 3, later
    assert counted.long_calls == 1


@pytest.mark.slow
def test_the_short_way_costs_the_host_at_most_10_us(counted: CountedLauncher, fake_driver: FakeDriver) -> None:
    """With a C function in the place of the driver's launch; what torch and the driver take is measured on the GPU."""
    fake_driver.cuLaunchKernelEx = ctypes.CDLL("libm.so.6")["feclearexcept"]  # type: ignore[method-assign]
    x, w = tensor(256, 64), tensor(512, 64).t()
    all_reduce(x, w)
    short = counted.shortcut(GemmAllReduce)
    assert short is not None
    best = float("inf")
    for _ in range(15):
        started = time.thread_time()
        for _ in range(500):
            short([x], [w], None, "sum", 2, "0", "key")
        best = min(best, time.thread_time() - started)
    assert best / 500 * 1e6 < 10


def test_what_may_change_a_launch_goes_the_long_way(counted: CountedLauncher, fake_driver: FakeDriver) -> None:
    x, w, bias = tensor(256, 64), tensor(512, 64).t(), tensor(512)
    operator = torch.ops.mkcompile.gemm_all_reduce.default
    calls: list[tuple[Any, ...]] = [
        ([x], [w], None, "sum", 2, "0", "key"),
        ([x], [w], None, "avg", 2, "0", "key"),
        ([x], [w], None, "sum", 2, "0", "other key"),
        ([x], [w], bias, "sum", 2, "0", "key"),
        ([x[:128]], [w], None, "sum", 2, "0", "key"),
        ([x], [tensor(64, 512)], None, "sum", 2, "0", "key"),
        ([x, x], [w, w], None, "sum", 2, "0", "key"),
        ([x.half()], [w.half()], None, "sum", 2, "0", "key"),
    ]
    for _ in range(2):
        for arguments in calls:
            operator(*arguments)
    assert counted.long_calls == len(calls) and len(fake_driver.launches) == 2 * len(calls)
    assert [one.scale for one in fake_driver.launches[:2]] == [1.0, 0.5]
    reduce_scatter(x, w, [256, 512])
    reduce_scatter(x, w, [2, 128, 512])
    reduce_scatter(x, w, [2, 128, 512], dim=1)
    assert counted.long_calls == len(calls) + 3


def test_arguments_of_calls_by_hand_are_checked_each_time(counted: CountedLauncher, fake_driver: FakeDriver) -> None:
    x, w = tensor(256, 64), tensor(512, 64).t()
    for _ in range(2):
        all_reduce(x, w, key="")
    assert counted.long_calls == 1 and len(fake_driver.launches) == 2
    with pytest.raises(OperatorInputError, match="one dtype"):
        all_reduce(x, w.half(), key="")
    with pytest.raises(OperatorInputError, match="columns"):
        all_reduce(x, tensor(512, 72).t(), key="")


def test_other_addresses_get_the_block_that_they_would_get_anew(
    counted: CountedLauncher, platform: FakePlatform, fake_driver: FakeDriver
) -> None:
    x, w = [tensor(256, 64) for _ in range(2)], [tensor(512, 64).t() for _ in range(2)]
    bias = [tensor(512), tensor(512)]
    first = all_reduce(x[0], w[0], bias[0])
    assert fake_driver.moved_maps == 0
    second = all_reduce(x[1], w[1], bias[1])
    assert fake_driver.moved_maps == 3
    for operation in counted._operations.values():
        operation.launches.clear()  # type: ignore[union-attr]
        operation.model = None  # type: ignore[union-attr]
    third = all_reduce(x[1], w[1], bias[1])
    assert fake_driver.moved_maps == 3
    _, moved, anew = fake_driver.launches
    assert moved.out[0] == second.data_ptr() and anew.out[0] == third.data_ptr() and first is not second
    moved.out[0], moved.out_address = anew.out[0], anew.out_address
    assert bytes(moved) == bytes(anew)


def test_an_operand_that_must_be_copied_is_copied_after_others_were_not(
    counted: CountedLauncher, fake_driver: FakeDriver
) -> None:
    x, w = tensor(256, 64), tensor(512, 64).t()
    all_reduce(x, w)
    misaligned = tensor(256 * 64 + 4)[4:].view(256, 64)
    assert misaligned.data_ptr() % 16 != 0
    for _ in range(2):
        all_reduce(misaligned, w)
        assert fake_driver.launches[-1].a[0][0] not in (x.data_ptr(), misaligned.data_ptr())
    all_reduce(x, w)
    assert fake_driver.launches[-1].a[0][0] == x.data_ptr()


def test_a_report_is_raised_and_the_workspace_made_anew(counted: CountedLauncher, platform: FakePlatform) -> None:
    x, w = tensor(256, 64), tensor(512, 64).t()
    all_reduce(x, w)
    platform.report(0, op=2, rank=0, peer=1, role=2, code=abi.PEER_TIMEOUT)
    with pytest.raises(PeerTimeoutError):
        all_reduce(x, w)
    all_reduce(x, w)
    assert len(platform.backing_of_group.allocated_bytes) == 2 and counted.long_calls == 1


def test_streams_and_captures_are_looked_at_each_time(counted: CountedLauncher, platform: FakePlatform) -> None:
    x, w = tensor(256, 64), tensor(512, 64).t()
    for stream, capture in ((7, 0), (9, 0), (9, 3), (9, 0)):
        platform.stream, platform.fake_streams.capturing = stream, capture
        all_reduce(x, w)
    assert counted.long_calls == 1
    assert platform.fake_streams.log == [
        "record 1 on 7",
        "9 waits 1",
        "record 1 on 9",
        "record 2 on 9",
        "record 1 on 9",
    ]


def test_a_group_that_ended_is_not_launched_on(counted: CountedLauncher, fake_driver: FakeDriver) -> None:
    x, w = tensor(256, 64), tensor(512, 64).t()
    all_reduce(x, w, key="")
    held = dist.group.WORLD
    assert held is not None
    dist.destroy_process_group()
    with pytest.raises(GroupError):
        all_reduce(x, w, key="")
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    all_reduce(x, w, key="")
    assert counted.long_calls == 2 and len(fake_driver.launches) == 2


def test_a_launcher_that_is_a_function_sees_every_call(counted: CountedLauncher) -> None:
    x, w = tensor(256, 64), tensor(512, 64).t()
    all_reduce(x, w)
    before, seen = registry._REGISTRY.launcher, []

    def watch(call: Call) -> Any:
        seen.append(call)
        return before(call) if before is not None else None

    set_launcher(watch)
    all_reduce(x, w)
    set_launcher(before)
    all_reduce(x, w)
    assert len(seen) == 1 and counted.long_calls == 2, "and the short way is back with its launcher"
