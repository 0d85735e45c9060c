"""Reductions that are added in place, on a machine without GPUs: which launches add, where, and what is left alone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mkcompile.errors import OperatorInputError, PeerTimeoutError, WorkspaceError
from mkcompile.ops.gemm_all_reduce import GemmAllReduceAdd
from mkcompile.ops.gemm_reduce_scatter import GemmReduceScatterAdd
from mkcompile.ops.registry import Site, arguments, overload
from mkcompile.plan import key
from mkcompile.plan.kernels import AVAILABLE
from mkcompile.runtime import abi
from mkcompile.runtime.adding import Adding, ReductionAdd
from mkcompile.runtime.launcher import Launcher
from mkcompile.runtime.machine import own_basis
from mkcompile.runtime.tactics import Planned
from tests.runtime.conftest import PANELS
from tests.runtime.fakes import FakeDriver, FakePlatform, lone_group
from tests.runtime.test_shortcut import CountedLauncher, counted

__all__ = ["counted"]  # a fixture
END = "sum", 2, "0", "key"
ONE = 0x3F80  # of bfloat16


def tensor(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def all_reduce(m: int = 256, n: int = 512, **changes: Any) -> GemmAllReduceAdd:
    return replace(GemmAllReduceAdd(tensor(m, n), [tensor(m, 64)], [tensor(n, 64).t()], None, *END), **changes)


def reduce_scatter(m: int = 256, n: int = 512, **changes: Any) -> GemmReduceScatterAdd:
    w, shape = [tensor(n, 64).t()], [m // 4, 4, n]
    call = GemmReduceScatterAdd(tensor(m // 4, 2, n), [tensor(m, 64)], w, tensor(n), shape, 1, *END)
    return replace(call, **changes)


BOTH = pytest.mark.parametrize("make", [all_reduce, reduce_scatter], ids=["ar", "rs"])
Make = Callable[..., ReductionAdd]


def unaligned(like: Tensor) -> Tensor:
    """Contiguous, but not where the copy engine could reach it."""
    return torch.full((like.numel() + 1,), 3.0, dtype=like.dtype)[1:].view(like.shape)


@BOTH
def test_the_kernel_adds_to_the_residual_itself(
    counted: CountedLauncher, fake_driver: FakeDriver, platform: FakePlatform, make: Make
) -> None:
    call = make()
    others = [torch.zeros_like(call.residual) for _ in range(2)]
    operator = overload(type(call))
    for residual in (call.residual, *others, call.residual):
        assert operator(*arguments(replace(call, residual=residual))) is None
        block = fake_driver.launches[-1]
        assert (block.adds, block.out[0]) == (1, residual.data_ptr())
    assert counted.long_calls == 1 and len(fake_driver.launches) == 4 and len(platform.loaded) == 1
    block = fake_driver.launches[-1]
    assert block.segments == (1 if make is all_reduce else 64) and (block.bias != 0) == (make is reduce_scatter)


@BOTH
def test_the_sum_alone_is_another_launch_of_the_same_kernel(
    launcher: Launcher, platform: FakePlatform, fake_driver: FakeDriver, make: Make
) -> None:
    call = make()
    out = launcher(call.addend())
    assert launcher(call) is call.residual and launcher(replace(call, residual=out)) is out
    launcher(call.addend())
    assert [block.adds for block in fake_driver.launches] == [0, 1, 1, 0] and len(platform.loaded) == 1
    assert len({block.identity for block in fake_driver.launches}) == 1, "peers may do the one or the other"
    assert len(platform.backing_of_group.allocated_bytes) == 1


@BOTH
def test_generated_code_adds_without_a_look_up(counted: CountedLauncher, fake_driver: FakeDriver, make: Make) -> None:
    call = make()
    site = Site(call.NAME, fixed=True)
    for _ in range(3):
        site(*arguments(call))
    assert isinstance(site._shortcut.__self__, Adding)  # type: ignore[union-attr]
    assert [block.adds for block in fake_driver.launches] == [1, 1, 1] and counted.long_calls == 1


def writes_ones(fake: FakeDriver, launcher: Launcher, elements: int) -> None:
    """Let each launch that does not add store ones into its result."""
    launch = fake.cuLaunchKernelEx

    def store(*given: Any) -> int:
        code = launch(*given)
        block = fake.launches[-1]
        if not block.adds:
            (ctypes.c_uint16 * elements).from_address(block.out_address)[:] = [ONE] * elements
        return code

    fake.cuLaunchKernelEx = store  # type: ignore[method-assign]


@BOTH
def test_a_residual_that_tiles_can_not_reach_gets_the_sum_afterwards(
    launcher: Launcher, fake_driver: FakeDriver, make: Make
) -> None:
    call = make()
    residual = unaligned(call.residual)
    writes_ones(fake_driver, launcher, residual.numel())
    for times in (1, 2):
        assert launcher(replace(call, residual=residual)) is residual
        assert torch.equal(residual, torch.full_like(residual, 3.0 + times))
    assert launcher(call) is call.residual
    assert [block.adds for block in fake_driver.launches] == [0, 0, 1]


@pytest.mark.parametrize("kind", ["few rows", "direct", "over nodes"])
def test_kernels_that_only_store_are_followed_by_an_addition(fake_driver: FakeDriver, kind: str) -> None:
    platform = FakePlatform()
    if kind == "over nodes":
        platform.nodes = (0, 1)
    call = all_reduce(m=8) if kind == "few rows" else all_reduce()
    if kind == "direct":
        call = replace(call, plan_key=key.with_facts("always;a problem", [key.STAYS]))
    with lone_group():
        launcher = Launcher(platform, Planned(own_basis, available=AVAILABLE if kind == "few rows" else PANELS))
        writes_ones(fake_driver, launcher, call.residual.numel())
        assert launcher(call) is call.residual
        config = platform.loaded[0]
        assert {"few rows": config.streams, "direct": config.broadcast == "direct"}.get(kind, config.network != "none")
        assert not config.can_add and torch.equal(call.residual, 2 * tensor(*call.residual.shape))


@BOTH
def test_what_is_refused_leaves_the_residual_alone(
    launcher: Launcher, platform: FakePlatform, fake_driver: FakeDriver, make: Make
) -> None:
    call = make()
    before = call.residual.clone()
    platform.fake_streams.capturing = 1
    with pytest.raises(WorkspaceError, match="warm up first"):
        launcher(call)
    platform.fake_streams.capturing = 0
    for wrong in (before.float(), before[:-1], before.transpose(0, 1).contiguous().transpose(0, 1)):
        with pytest.raises(OperatorInputError, match="residual"):
            launcher(replace(call, residual=wrong))
    assert not fake_driver.launches
    launcher(call)
    platform.report(0, op=2, rank=0, peer=1, role=2, tile=3, expected=9, seen=8, code=abi.PEER_TIMEOUT)
    with pytest.raises(PeerTimeoutError):
        launcher(call)
    assert len(fake_driver.launches) == 1 and torch.equal(call.residual, before)
    assert launcher(call) is call.residual and fake_driver.launches[-1].adds == 1


@BOTH
def test_without_a_kernel_or_a_gain_the_reference_adds(launcher: Launcher, fake_driver: FakeDriver, make: Make) -> None:
    small = all_reduce(m=1, n=64, plan_key="auto;key") if make is all_reduce else make(n=516)
    before = small.residual.clone()
    assert launcher(small) is None and launcher(small) is None
    assert not fake_driver.launches and torch.equal(small.residual, before)


def test_another_group_of_the_same_name_is_asked_anew(platform: FakePlatform, fake_driver: FakeDriver) -> None:
    launcher = Launcher(platform, Planned(own_basis, available=PANELS))
    for lives in range(1, 4):
        with lone_group():
            assert launcher(all_reduce()) is not None
            assert len(platform.backing_of_group.allocated_bytes) == lives
            assert {type(one) for one in launcher._operations.values()} == {Adding, type(one_operation(launcher))}
            assert len(launcher._operations) == 2, "what was known of the group that ended is forgotten"


def one_operation(launcher: Launcher) -> Any:
    return next(one.plain for one in launcher._operations.values() if isinstance(one, Adding))
