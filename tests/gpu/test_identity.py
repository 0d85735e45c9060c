"""Ranks that come to one place in the order of launches with different launches: found on both, at once and by name."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch

from mkcompile.errors import LaunchMismatchError, PeerTimeoutError, WorkspaceError
from mkcompile.runtime.kernel import PreparedLaunch
from mkcompile.runtime.kernel_config import KernelConfig

from .ranks import RankGroup, nan_outputs, random_input
from .test_reductions import check, config_of

SCATTER = config_of("gemm_reduce_scatter", "none", (128, 128))
REDUCE = config_of("gemm_all_reduce", "staged", (128, 128))
DIRECT = config_of("gemm_all_reduce", "direct", (64, 128))
#: (operator and tile, rows of the GEMM, columns) of rank 0's launch and of rank 1's.
PAIRS = {
    "columns": ((SCATTER, 1024, 512), (SCATTER, 1024, 1024)),
    "rows": ((REDUCE, 512, 512), (REDUCE, 1024, 512)),
    "operator": ((SCATTER, 1024, 512), (REDUCE, 1024, 512)),
    "tile": ((DIRECT, 1024, 512), (REDUCE, 1024, 512)),
    "one tile and many": ((REDUCE, 64, 128), (SCATTER, 4096, 1024)),
}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A launch a rank, and the memory that they use."""

    launches: list[PreparedLaunch]
    keep: tuple[object, ...]


def prepared(group: RankGroup, config: KernelConfig, m: int, n: int) -> Prepared:
    """With inputs of their own."""
    inputs = [random_input(rank, device, m, n, 264, config) for rank, device in enumerate(group.devices)]
    rows = m // group.world if config.operator == "gemm_reduce_scatter" else m
    outs = nan_outputs(group, rows, n, config)
    return Prepared(group.prepare(config, inputs, outs), (inputs, outs))


def described(*launches: PreparedLaunch) -> dict[int, str]:
    """What the process knows of launches."""
    return {one.identity.number: one.identity.text for one in launches}


@pytest.mark.parametrize("name", PAIRS)
def test_ranks_with_different_launches_both_say_so(name: str) -> None:
    group = RankGroup((0, 0), timeout_s=4.0)
    check(group, SCATTER, 512, 512, 64, epochs=1)  # the workspace has been in use
    first, second = (prepared(group, *one) for one in PAIRS[name])
    group.synchronize()
    started = time.monotonic()
    group.run(first.launches, [0])
    group.run(second.launches, [1])
    group.synchronize()
    assert time.monotonic() - started < 2.0, "not by its deadline"
    mine, theirs = first.launches[0], second.launches[1]
    names = described(mine, theirs)
    for rank, (own, other) in enumerate([(mine, theirs), (theirs, mine)]):
        with pytest.raises(LaunchMismatchError) as caught:
            group.faults[rank].check(names)
        text = str(caught.value)
        assert f"rank {rank} launched {own.identity.text}" in text, text
        assert f"rank {1 - rank} launched {other.identity.text}" in text, text
    with pytest.raises(LaunchMismatchError, match=r"never launched \(identity 0x"):
        group.faults[0].check()


def test_a_rank_that_skips_a_launch_is_found() -> None:
    group = RankGroup((0, 0), timeout_s=4.0)
    skipped, next_one = prepared(group, REDUCE, 1024, 512), prepared(group, SCATTER, 2048, 512)
    group.synchronize()
    group.run(skipped.launches, [0])
    group.run(next_one.launches)
    group.synchronize()
    for rank in range(2):
        with pytest.raises(LaunchMismatchError):
            group.faults[rank].check()


def test_a_replay_after_a_fault_reports_again() -> None:
    group = RankGroup((0, 0), timeout_s=0.5)
    kept = prepared(group, SCATTER, 1024, 512)  # a capture gives memory that nobody holds back to the driver
    launches = kept.launches
    group.run(launches)
    group.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=group.streams[0]):
        launches[0].run(torch.cuda.current_stream().cuda_stream, captured=True)
    fault = group.faults[0]
    for error in (PeerTimeoutError, WorkspaceError, WorkspaceError):
        graph.replay()
        group.synchronize()
        with pytest.raises(error):
            fault.check()
        fault.clear()
    launches[0].run(group.streams[0].cuda_stream)
    group.synchronize()
    fault.check()  # a launch of the host that comes after is covered by the first error, and says nothing
