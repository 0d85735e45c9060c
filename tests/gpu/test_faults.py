"""When a peer does not come: the others give up within the deadline, name it, and the GPU stays usable."""

from __future__ import annotations

import time

import pytest
import torch

from mkcompile.errors import LaunchOrderError, PeerTimeoutError

from .ranks import RankGroup, nan_outputs, random_input, with_grid
from .test_reductions import BOTH, check, config_of


@BOTH
@pytest.mark.parametrize(("world", "missing"), [(2, 0), (2, 1), (4, 2)])
def test_peer_that_never_launches_is_named(operator: str, broadcast: str, world: int, missing: int) -> None:
    group = RankGroup((0,) * world, timeout_s=0.5)
    config = config_of(operator, broadcast, (128, 128))
    inputs = [random_input(rank, 0, 1024, 1024, 264, config) for rank in range(world)]
    outs = nan_outputs(group, 1024 // world if operator == "gemm_reduce_scatter" else 1024, 1024, config)
    launches = group.prepare(config, inputs, outs)
    present = [rank for rank in range(world) if rank != missing]
    start_s = time.monotonic()
    group.run(launches, present)
    group.synchronize()
    assert time.monotonic() - start_s < 5.0
    for rank in present:
        with pytest.raises(PeerTimeoutError) as caught:
            group.faults[rank].check()
        report = caught.value.report
        assert (report.operator, report.rank, report.peer) == (operator, rank, missing), str(report)
        assert 0.4 < report.waited_s < 2.0
    group.run(launches, present)  # an aborted workspace runs nothing, and does not hang
    group.synchronize()
    assert torch.ones(8, device="cuda:0").sum().item() == 8.0


def test_peer_that_stops_coming_is_named_after_good_launches() -> None:
    group = RankGroup((0, 0), timeout_s=0.5)
    config = config_of("gemm_reduce_scatter", "none", (128, 128))
    check(group, config, 1024, 1024, 264)
    inputs = [random_input(rank, 0, 1024, 1024, 264, config) for rank in range(2)]
    launches = group.prepare(config, inputs, nan_outputs(group, 512, 1024, config))
    group.run(launches, [0])
    group.synchronize()
    with pytest.raises(PeerTimeoutError, match=r"waited .* for rank 1"):
        group.check()


def test_second_launch_on_a_busy_workspace_is_refused() -> None:
    group = RankGroup((0, 0), timeout_s=1.0)
    config = config_of("gemm_reduce_scatter", "none", (64, 64))
    inputs = [random_input(rank, 0, 512, 512, 64, config) for rank in range(2)]
    outs = nan_outputs(group, 256, 512, config)
    schedule = with_grid(group.default_schedule(config, inputs[0]), 16)
    launches = group.prepare(config, inputs, outs, schedule)
    other = torch.cuda.Stream()
    launches[0].run(group.streams[0].cuda_stream)
    launches[0].run(other.cuda_stream)
    group.synchronize()
    with pytest.raises(LaunchOrderError):
        group.faults[0].check()
