"""How long is waited, and for whom: peers that come one after the other, one that is late, blocks that find no room."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from mkcompile.errors import PeerTimeoutError
from mkcompile.runtime.abi import WORKSPACE_HEADER_BYTES
from mkcompile.runtime.gather_schedule import GatherChoice, pull_choice, push_choice, stream_choice
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.stream_schedule import StreamForm

from .gather_calls import Call
from .ranks import RankGroup, nan_outputs, random_input, with_grid
from .test_all_gather import config_of as gather_config
from .test_all_gather import rows_of
from .test_few_rows import stream_config
from .test_reductions import config_of, expected_of
from .truth import assert_bitwise, summed

WORLD = 6
IMAGE_FETCHED = 4  # FlagKind in csrc/abi/workspace.h


def come_in_turn(group: RankGroup, launch: Callable[[int], None]) -> None:
    """Each rank 0.75 deadlines after the one before it: the last comes when 3.75 have passed."""
    started_s = time.monotonic()
    for rank in range(group.world):
        time.sleep(
            max(0.0, started_s + rank * 0.75 * group.timeout_s - time.monotonic())
        )  # the lateness that is tested
        launch(rank)
    group.synchronize()
    group.check()


def test_peers_that_come_one_after_the_other_are_waited_for_by_a_reduction() -> None:
    group, config = RankGroup((0,) * WORLD, timeout_s=0.8), config_of("gemm_reduce_scatter", "none", (128, 128))
    inputs = [random_input(rank, 0, 128 * WORLD, 520, 264, config, integers=True) for rank in range(WORLD)]
    outs = nan_outputs(group, 128, 520, config)
    launches = group.prepare(config, inputs, outs)
    come_in_turn(group, lambda rank: group.run(launches, [rank]))
    truth, _ = summed(inputs, config, "cuda:0")
    for rank, out in enumerate(outs):
        assert_bitwise(out, expected_of(config, rank, WORLD, truth), f"rank {rank}")


@pytest.mark.parametrize("variant", ["push", "stream"])
def test_peers_that_come_one_after_the_other_are_waited_for_by_a_gather(variant: str) -> None:
    group, size = RankGroup((0,) * WORLD, timeout_s=0.8), rows_of(16, WORLD)
    call = Call.make(group, gather_of(group, variant), size, integers=True)
    group.synchronize()
    come_in_turn(group, lambda rank: call.run(group, ranks=[rank]))
    call.check(True, variant)


def gather_of(group: RankGroup, variant: str) -> GatherChoice:
    """Of few rows: those of all ranks lie in one tile."""
    size = rows_of(16, group.world)
    if variant == "push":
        return push_choice(gather_config((128, 128)), size, group.max_grid(), False)
    base = KernelConfig(operator="all_gather_gemm")
    return stream_choice(base, size, group.max_grid(), StreamForm((64, 64), 1))


def test_fetched_rows_are_told_of_before_those_of_a_late_peer_are_waited_for() -> None:
    group, size = RankGroup((0, 0, 0), timeout_s=3.0), rows_of(500, 3)
    call = Call.make(group, pull_choice(gather_config((128, 160)), size, group.max_grid()), size, integers=True)
    group.synchronize()
    call.run(group, ranks=[0, 1])
    images = 4 * -(-size.k // 64)
    begin = WORKSPACE_HEADER_BYTES + (IMAGE_FETCHED * 3 + 1) * group.layout.max_tiles * 4
    limit_s, told = time.monotonic() + 1.5, 0
    while told < images and time.monotonic() < limit_s:
        told = int(group.workspaces[0][begin : begin + 4 * images].cpu().view(torch.int32).sum())
    assert told == images, f"{told} of {images} images of rank 1 while rank 2 is late"
    call.run(group, ranks=[2])
    group.synchronize()
    group.check()
    call.check(True, "late")


def test_a_first_block_whose_launch_finds_no_room_says_so_and_makes_room() -> None:
    """Rank 1 is one block, another group's launch has all but two SMs: the first block of rank 0 has the last one."""
    group, others = RankGroup((0, 0), timeout_s=3.0), RankGroup((0, 0), timeout_s=3.0)
    config = stream_config("gemm_all_reduce", (64, 64))
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    hog_inputs = [random_input(rank, 0, 64, 64 * (sms - 2), 264, config) for rank in range(2)]
    schedule = others.default_schedule(config, hog_inputs[0])
    hog = others.prepare(
        config, hog_inputs, nan_outputs(others, 64, 64 * (sms - 2), config), with_grid(schedule, sms - 2)
    )
    inputs = [random_input(rank, 0, 64, 512, 264, config) for rank in range(2)]
    outs = nan_outputs(group, 64, 512, config)
    slow = group.prepare(config, inputs, outs, with_grid(schedule, 1))
    group.timeout_s = 0.2
    launches = group.prepare(config, inputs, outs, with_grid(schedule, 8))
    group.timeout_s = 3.0
    group.synchronize()
    group.run(slow, [1])
    others.run(hog, [0])
    group.run(launches, [0])
    group.synchronize()
    others.synchronize()
    with pytest.raises(PeerTimeoutError, match=r"rank 0 .* for the blocks of its own launch") as caught:
        group.faults[0].check()
    assert (caught.value.report.expected, caught.value.report.seen) == (7, 0)
    with pytest.raises(PeerTimeoutError, match="for rank 0"):
        group.faults[1].check()
    assert torch.ones(8, device="cuda:0").sum().item() == 8.0
