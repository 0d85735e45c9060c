"""What traced kernels record, with virtual ranks on one GPU: one clock, so that every order can be checked."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mkcompile.runtime.kernel import LaunchArguments, PreparedLaunch, compile_kernel, load_kernel
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.recorder import Recorder
from mkcompile.runtime.tensor_map import Matrix
from mkcompile.runtime.tile_schedule import LaunchSize, TileSchedule
from mkcompile.runtime.trace.clocks import align
from mkcompile.runtime.trace.exposed import summary
from mkcompile.runtime.trace.instances import LANE, ROLE, Instance, instances

from .ranks import RankGroup, random_input
from .test_reductions import BOTH, check, config_of

M, N, K, TILE = 1024, 1024, 520, (128, 128)


def count(one: Instance, role: str) -> int:
    """Records of a role."""
    return int((one.tasks["role"] == ROLE[role]).sum())


def check_lanes(one: Instance) -> None:
    """In every lane tasks follow each other, and wait no longer than they last; those of a block lie in its stay."""
    for place in np.unique(one.tasks[["block", "lane"]]):
        mine = one.tasks[(one.tasks["block"] == place["block"]) & (one.tasks["lane"] == place["lane"])]
        mine = np.sort(mine[mine["role"] != ROLE["block"]], order="start_ns")
        assert np.all(mine["end_ns"] >= mine["start_ns"]), place
        assert np.all(mine["waited_ns"] <= mine["end_ns"] - mine["start_ns"]), place
        assert np.all(mine["start_ns"][1:] >= mine["end_ns"][:-1]), place


@BOTH
def test_every_task_is_recorded_and_the_result_is_right(operator: str, broadcast: str) -> None:
    group = RankGroup((0, 0), arena_bytes=160 << 20)
    group.record()
    config = config_of(operator, broadcast, TILE, trace=True)
    check(group, config, M, N, K, epochs=3)
    traces = group.traces()
    tiles = (M // 128) * (N // 128)
    for rank, trace in enumerate(traces):
        assert trace.overwritten == 0
        found = instances(trace)
        assert [one.epoch for one in found] == [1, 2, 3], rank
        for one in found:
            own = tiles // 2
            assert count(one, "load") == count(one, "mainloop") // 2 == count(one, "epilogue") // 2 == tiles
            assert count(one, "store") == 2 * own and count(one, "push") == 2 * (tiles - own)
            arrivals = {"none": 0, "direct": count(one, "receive") - 2 * tiles - 1, "staged": count(one, "copy")}[
                broadcast
            ]
            assert arrivals == (0 if broadcast == "none" else tiles - own)
            check_lanes(one)
    (clock,) = align(traces)[1:]
    assert clock.within_ns is not None and abs(clock.offset_ns) <= clock.within_ns, "one GPU has one clock"
    assert clock.within_ns < 100_000, clock
    for numbers in summary(traces):
        assert 0 < numbers.computing_us <= numbers.span_us and 0 < numbers.busy_share < 1, numbers


@pytest.mark.parametrize("operator", ["gemm_reduce_scatter", "gemm_all_reduce"], ids=["rs", "ar"])
@pytest.mark.parametrize("hands_over", [False, True], ids=["sends", "hands_over"])
def test_a_kernel_for_few_rows_is_recorded(operator: str, hands_over: bool) -> None:
    group, grid = RankGroup((0, 0), arena_bytes=64 << 20), 16
    group.record()
    config = config_of(operator, "none", (128, 64), streams=True, hands_over=hands_over, trace=True)
    check(group, config, 512, N, K, epochs=3, schedule=TileSchedule(grid=grid))
    traces, tiles = group.traces(), (512 // 128) * (N // 64)
    for rank, trace in enumerate(traces):
        assert trace.overwritten == 0
        found = instances(trace)
        assert [one.epoch for one in found] == [1, 2, 3], rank
        for one in found:
            assert count(one, "block") == grid and count(one, "load") == tiles
            assert count(one, "mainloop") == count(one, "epilogue") == 2 * tiles, "of both math groups"
            # by two warps; a block's last tile, and rows of one's own, are not handed over
            most = 2 * (tiles - grid) if hands_over else 0
            assert count(one, "push") == most or (0 < count(one, "push") < most and operator == "gemm_reduce_scatter")
            assert len(np.unique(one.tasks["tile"][one.tasks["role"] == ROLE["mainloop"]])) == tiles
            check_lanes(one)
    for numbers in summary(traces):
        assert 0 < numbers.computing_us <= numbers.span_us and 0 < numbers.busy_share < 1, numbers


def test_a_product_of_one_rank_is_recorded() -> None:
    config = KernelConfig(block_m=128, block_n=128, trace=True)
    given = random_input(0, 0, M, N, K, config)
    out = torch.empty(M, N, dtype=torch.bfloat16, device="cuda:0")
    recorder = Recorder(device=torch.device("cuda", 0), num_blocks=16, records=8)
    arguments = LaunchArguments(
        terms=((Matrix.of(given.x), Matrix.of(given.w)),),
        out=Matrix.of(out),
        schedule=TileSchedule(grid=20),
        trace=recorder,
    )
    launch = PreparedLaunch(load_kernel(compile_kernel(config), 0), arguments)
    for _ in range(4):
        launch.run(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    assert torch.allclose(out.float(), given.x.float() @ given.w.float().t(), rtol=0.02, atol=0.5)
    trace = recorder.read(rank=0)
    assert trace.tasks["block"].max() == 15, "blocks without a ring write nothing"
    assert trace.overwritten > 0, "four tiles of each of four launches, in rings of eight"
    newest = instances(trace)[-1]
    assert newest.epoch == 0 and set(np.unique(newest.tasks["lane"])) >= {LANE["load"], LANE["compute 1"]}
    assert count(newest, "load") == sum(
        LaunchSize(m=M, n=N, k=K).tiles(config) > block + 20 * i for block in range(16) for i in range(4)
    )
