"""From a kernel's report to the error that is raised."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import mkcompile
from mkcompile.errors import LaunchMismatchError, PeerTimeoutError, WorkspaceError
from mkcompile.ops.registry import launcher as installed
from mkcompile.ops.registry import set_launcher
from mkcompile.runtime import abi
from mkcompile.runtime.agree import Agreement
from mkcompile.runtime.dispatch import Dispatch
from mkcompile.runtime.exchange import Exchange
from mkcompile.runtime.faults import error_of
from mkcompile.runtime.identity import LaunchIdentity
from mkcompile.runtime.launcher import Launcher

from .fakes import FakeDriver, FakePlatform
from .test_launcher import all_reduce

OURS, THEIRS = LaunchIdentity.of("gemm_all_reduce 8x8x8"), LaunchIdentity.of("gemm_reduce_scatter 16x8x8")


def mismatch() -> abi.FaultReport:
    return abi.FaultReport(code=abi.LAUNCH_MISMATCH, op=2, rank=0, peer=1, expected=OURS.number, seen=THEIRS.number)


def test_a_mismatch_names_both_ranks_and_what_each_launched() -> None:
    error = error_of(mismatch(), (4, 6), {one.number: one.text for one in (OURS, THEIRS)})
    assert isinstance(error, LaunchMismatchError)
    assert "rank 4 launched gemm_all_reduce 8x8x8; rank 6 launched gemm_reduce_scatter 16x8x8" in str(error)


def test_a_launch_that_this_rank_never_made_is_named_by_its_identity() -> None:
    text = str(error_of(mismatch(), (4, 6), {OURS.number: OURS.text}))
    assert f"rank 6 launched what this rank has never launched (identity {THEIRS.number:#010x})" in text


def test_a_rank_that_waited_for_its_own_blocks_says_so() -> None:
    report = abi.FaultReport(code=abi.PEER_TIMEOUT, op=2, role=5, rank=1, peer=1, expected=127, seen=3, waited_ns=10**9)
    text = str(error_of(report, (4, 6), {}))
    assert "rank 6 (entry) waited 1.0 s for the blocks of its own launch" in text and "expected 127, saw 3" in text


def test_a_replay_after_a_fault_says_to_capture_anew() -> None:
    report = abi.FaultReport(code=abi.REPLAY_AFTER_FAULT, op=1, rank=1, seen=abi.PEER_TIMEOUT)
    error = error_of(report, (0, 1), {})
    assert isinstance(error, WorkspaceError) and "Capture graphs of this group anew" in str(error)


def test_launches_that_differ_have_identities_that_differ(launcher: Launcher, fake_driver: FakeDriver) -> None:
    launcher(all_reduce())
    launcher(all_reduce())
    launcher(all_reduce(m=512))
    first, again, other = fake_driver.launches
    assert first.identity == again.identity != other.identity


def test_check_raises_what_a_kernel_reported_without_another_call(
    launcher: Launcher, platform: FakePlatform, fake_driver: FakeDriver
) -> None:
    before = installed()
    set_launcher(Dispatch(Agreement(timeout_s=1.0), launcher))
    try:
        mkcompile.check()
        launcher(all_reduce())
        mkcompile.check()
        identity = fake_driver.launches[-1].identity
        platform.report(0, expected=identity, seen=7, peer=1, code=abi.LAUNCH_MISMATCH)
        with pytest.raises(LaunchMismatchError, match="rank 0 launched gemm_all_reduce"):
            mkcompile.check()
        mkcompile.check()
    finally:
        set_launcher(before)


@pytest.mark.parametrize("how", ["it grows", "its group has ended"])
def test_a_launch_that_fails_while_its_workspace_is_given_back_is_heard_of(
    launcher: Launcher, platform: FakePlatform, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    ending, other = dist.new_group([0, 1]), dist.new_group([0, 1])
    launcher(all_reduce(group=ending.group_name))
    settle = platform.backing_of_group.settle

    def wait_for_the_kernel() -> None:
        settle()
        platform.report(0, op=2, rank=0, peer=1, role=2, expected=9, seen=8, code=abi.PEER_TIMEOUT)

    monkeypatch.setattr(platform.backing_of_group, "settle", wait_for_the_kernel)
    if how == "it grows":
        launcher(all_reduce(m=65536, group=ending.group_name))
    else:
        dist.destroy_process_group(ending)
        launcher(all_reduce(group=other.group_name))
    board = launcher._resources.board
    assert board is not None and len(board._slots) == 2, "the report's place is nobody else's yet"
    with pytest.raises(PeerTimeoutError, match="rank 1"):
        launcher.check()
    launcher.check()
    assert len(board._slots) == 1


def test_a_rank_without_room_for_reports_is_heard_of_by_all(
    launcher: Launcher, platform: FakePlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher(all_reduce())
    board = launcher._resources.board
    assert board is not None
    steps: list[str] = []

    def gather(exchange: Exchange, step: str, value: str) -> tuple[str, str]:
        steps.append(step.rpartition(": ")[2])
        return value, ""

    monkeypatch.setattr(Exchange, "gather", gather)
    others = [board.claim((0, 1)) for _ in range(15)]
    with pytest.raises(WorkspaceError, match="rank 0: 16 workspaces are in use"):
        launcher(all_reduce(m=65536))
    assert steps == ["a place for reports"], "before any rank makes memory"
    board.release(others[0])
    launcher(all_reduce(m=65536))


def test_only_captured_launches_are_marked_as_such(
    launcher: Launcher, platform: FakePlatform, fake_driver: FakeDriver
) -> None:
    call = all_reduce()
    launcher(call)
    platform.fake_streams.capturing = 3
    launcher(call)
    platform.fake_streams.capturing = 0
    launcher(call)
    assert [one.is_captured for one in fake_driver.launches] == [0, 1, 0]
