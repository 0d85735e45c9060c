"""Transfers of a launch that was given up: they raise no flag, peers are told, and what may be spoilt is reported."""

from __future__ import annotations

import pytest
import torch

from mkcompile.errors import PeerGaveUpError, PeerTimeoutError
from mkcompile.runtime import abi
from mkcompile.runtime.gather_launch import GatherSize
from mkcompile.runtime.gather_schedule import GatherChoice, engine_choice, library_choice
from mkcompile.runtime.kernel_config import KernelConfig

from .gather_calls import Call, Engines
from .ranks import RankGroup

SIZE = GatherSize(segment_rows=512, k=512, n=(520,), world=2)
CONFIG = KernelConfig(operator="all_gather_gemm", block_m=128, block_n=128)
ENGINE = pytest.mark.parametrize("variant", ["copy_engine", "library"])


def choice_of(group: RankGroup, variant: str) -> GatherChoice:
    """By either way."""
    return library_choice(CONFIG, SIZE) if variant == "library" else engine_choice(CONFIG, SIZE, group.max_grid())


def word(workspace: torch.Tensor, offset_bytes: int) -> int:
    """Of a rank's workspace."""
    return int(workspace[offset_bytes : offset_bytes + 4].view(torch.int32).item())


def run_alone(group: RankGroup, call: Call, rank: int) -> None:
    """The others never come."""
    with torch.cuda.stream(group.streams[rank]):
        call.prepared[rank].run(call.tensors[rank], torch.cuda.current_stream().cuda_stream, False)
    group.synchronize()


@ENGINE
def test_a_gate_that_gives_up_raises_no_flag_and_tells_its_peer(variant: str) -> None:
    group = RankGroup((0, 0), timeout_s=0.5)
    engines, choice = Engines(group, area_bytes=4 << 20), choice_of(group, variant)
    calls = [Call.make(group, choice, SIZE, seed=seed, integers=True, engines=engines) for seed in range(3)]
    calls[0].run(group)
    group.synchronize()
    group.check()
    calls[0].check(True, "all are there")
    flag = engines.side(1).places.flag(1, 0, 0) - group.workspaces[1].data_ptr()
    lost_peer = abi.WorkspaceHeader.lost_peer.offset
    before = word(group.workspaces[1], flag), word(group.workspaces[1], lost_peer)
    assert before == (1, 0)
    for call in calls[1:]:  # the second finds a workspace that has failed
        run_alone(group, call, 0)
    with pytest.raises(PeerTimeoutError) as caught:
        group.faults[0].check()
    assert caught.value.report.peer == 1
    assert (word(group.workspaces[1], flag), word(group.workspaces[1], lost_peer)) == (1, 1)
    run_alone(group, calls[1], 1)
    # blocks without rows of the peer end, and look, before the others' deadline
    with pytest.raises((PeerTimeoutError, PeerGaveUpError), match="rank 0"):
        group.faults[1].check()


@ENGINE
def test_rows_that_a_lost_peer_may_have_spoilt_are_reported(variant: str) -> None:
    group = RankGroup((0, 0), timeout_s=2.0)
    engines, choice = Engines(group, area_bytes=4 << 20), choice_of(group, variant)
    call = Call.make(group, choice, SIZE, integers=True, engines=engines)
    offset = abi.WorkspaceHeader.lost_peer.offset
    group.workspaces[1][offset : offset + 4].view(torch.int32).fill_(1)
    group.synchronize()
    call.run(group)
    group.synchronize()
    group.faults[0].check()
    with pytest.raises(PeerGaveUpError, match="rank 0 gave up"):
        group.faults[1].check()
