"""GEMM + reduce-scatter and GEMM + all-reduce with virtual ranks on one GPU, and with two GPUs where there are two."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch

from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.tile_schedule import TileSchedule

from .marks import ONE_AND_TWO_GPUS
from .ranks import RankGroup, RankInput, nan_outputs, random_input
from .truth import assert_bitwise, assert_close, summed

OPERATORS = (("gemm_reduce_scatter", "none"), ("gemm_all_reduce", "direct"), ("gemm_all_reduce", "staged"))
IDS = ["rs", "ar-direct", "ar-staged"]
ROWS = (1, 2, 16, 17, 63, 64, 65, 127, 128, 129, 255, 1000, 2048, 4097, 8192)
WORLDS = pytest.mark.parametrize("world", [2, 4, 8])
BOTH = pytest.mark.parametrize(("operator", "broadcast"), OPERATORS, ids=IDS)


@cache
def group_of(devices: tuple[int, ...]) -> RankGroup:
    """One group for all tests on the same devices: they share its workspaces, as operators of a model do."""
    return RankGroup(devices, arena_bytes=160 << 20)


def config_of(operator: str, broadcast: str, tile: tuple[int, int] = (128, 256), **others: object) -> KernelConfig:
    """A configuration."""
    return KernelConfig(operator=operator, broadcast=broadcast, block_m=tile[0], block_n=tile[1], **others)  # type: ignore[arg-type]


def expected_of(config: KernelConfig, rank: int, world: int, whole: torch.Tensor, segments: int = 1) -> torch.Tensor:
    """What rank `rank` must hold of the summed matrix."""
    if config.operator == "gemm_all_reduce":
        return whole
    rows, n = whole.shape
    shards = whole.view(segments, world, rows // segments // world, n)
    return shards[:, rank].reshape(rows // world, n)


def check(
    group: RankGroup, config: KernelConfig, m: int, n: int, k: int, *, epochs: int = 3, late: Sequence[int] = (),
    segments: int = 1, integers: bool = True, schedule: TileSchedule | None = None,
) -> None:  # fmt: skip
    """Back-to-back launches with different inputs, then all checked: close, exact, and the same on all ranks."""
    home = f"cuda:{group.devices[0]}"
    rows = m // group.world if config.operator == "gemm_reduce_scatter" else m
    epochs_inputs: list[list[RankInput]] = []
    epochs_outs = []
    launches = []
    for epoch in range(epochs):
        exact = integers and epoch % 2 == 1
        inputs = [random_input(r, d, m, n, k, config, epoch, exact) for r, d in enumerate(group.devices)]
        outs = nan_outputs(group, rows, n, config)
        epochs_inputs.append(inputs)
        epochs_outs.append(outs)
        launches.append(group.prepare(config, inputs, outs, segments=segments, schedule=schedule))
    group.synchronize()
    for epoch in range(epochs):
        for rank in late:
            group.delay(rank, 2_000_000 * (1 + epoch % 2))
        group.run(launches[epoch])
    group.synchronize()
    group.check()
    for epoch, (inputs, outs) in enumerate(zip(epochs_inputs, epochs_outs, strict=True)):
        truth, baseline = summed(inputs, config, home, group.local_world)
        for rank, out in enumerate(outs):
            what = f"{config.name} W={group.world} {m}x{n}x{k} epoch {epoch} rank {rank}"
            wanted, allowed = (expected_of(config, rank, group.world, x, segments) for x in (truth, baseline))
            if integers and epoch % 2 == 1:
                assert_bitwise(out.to(home), wanted, what)
            else:
                assert_close(out.to(home), wanted, allowed, what)
            if config.operator == "gemm_all_reduce":
                assert torch.equal(out.to(home).view(torch.int16), outs[0].to(home).view(torch.int16)), what


def check_replays(
    group: RankGroup, config: KernelConfig, m: int, n: int, k: int, *, replays: int, launches_of_graph: int = 1
) -> None:
    """Two ranks capture a launch each, or several; every replay, with other inputs, has the exact sum."""
    inputs = [random_input(rank, 0, m, n, k, config) for rank in range(2)]
    outs = nan_outputs(group, m // 2 if config.operator == "gemm_reduce_scatter" else m, n, config)
    launches, graphs = group.prepare(config, inputs, outs), []
    for rank in range(2):
        graph = torch.cuda.CUDAGraph()
        # a proxy's thread may call the driver meanwhile
        with torch.cuda.graph(graph, stream=group.streams[rank], capture_error_mode="thread_local"):
            for _ in range(launches_of_graph):
                launches[rank].run(torch.cuda.current_stream().cuda_stream)
        graphs.append(graph)
    for replay in range(replays):
        for rank in range(2):
            other = random_input(rank, 0, m, n, k, config, replay, True)
            inputs[rank].x.copy_(other.x)
            inputs[rank].w.copy_(other.w)
        torch.cuda.synchronize()
        for rank in range(2):
            with torch.cuda.stream(group.streams[rank]):
                graphs[rank].replay()
        group.synchronize()
        group.check()
        truth, _ = summed(inputs, config, "cuda:0")
        for rank, out in enumerate(outs):
            assert_bitwise(out, expected_of(config, rank, 2, truth), f"replay {replay} rank {rank}")


@BOTH
@WORLDS
def test_sum_over_ranks(operator: str, broadcast: str, world: int) -> None:
    check(group_of((0,) * world), config_of(operator, broadcast), 2048, 1024, 512)


@BOTH
@pytest.mark.parametrize("m", ROWS)
def test_any_number_of_rows(operator: str, broadcast: str, m: int) -> None:
    group = group_of((0, 0))
    rows = m * group.world if operator == "gemm_reduce_scatter" else m
    for tile in ((64, 64), (128, 256)) if m < 1000 else ((128, 256),):
        check(group, config_of(operator, broadcast, tile), rows, 520, 264)


@BOTH
@WORLDS
def test_fewer_tiles_than_ranks(operator: str, broadcast: str, world: int) -> None:
    check(group_of((0,) * world), config_of(operator, broadcast), world, 8, 72, epochs=5)


@BOTH
@pytest.mark.parametrize("tile", [(64, 32), (64, 128), (64, 256), (128, 64), (128, 128), (128, 192)], ids=str)
def test_every_tile(operator: str, broadcast: str, tile: tuple[int, int]) -> None:
    for layout in ("nk", "kn"):
        for dtype in ("bfloat16", "float16"):
            config = config_of(operator, broadcast, tile, weight_layout=layout, dtype=dtype)
            check(group_of((0, 0)), config, 600, 776, 200, epochs=2)


@BOTH
def test_bias_is_added_by_every_rank(operator: str, broadcast: str) -> None:
    check(group_of((0, 0)), config_of(operator, broadcast, has_bias=True), 600, 776, 200)


@BOTH
@pytest.mark.parametrize("late", [0, 1])
def test_reduce_waits_when_a_peer_is_late(operator: str, broadcast: str, late: int) -> None:
    check(group_of((0, 0)), config_of(operator, broadcast), 1536, 1032, 264, epochs=5, late=[late])


@WORLDS
def test_rows_in_segments(world: int) -> None:
    config = config_of("gemm_reduce_scatter", "none", (128, 128))
    check(group_of((0,) * world), config, 3 * world * 200, 264, 136, segments=3)


@BOTH
def test_staging_ring_smaller_than_the_result(operator: str, broadcast: str) -> None:
    config = config_of(operator, broadcast, (64, 64))
    group = RankGroup((0, 0), arena_bytes=(1 << 20) + (2 << 20), max_tiles=16384, timeout_s=5.0)
    check(group, config, 8192, 1024, 264, epochs=4)


def test_shapes_and_operators_alternate_on_one_workspace() -> None:
    group = RankGroup((0, 0), arena_bytes=64 << 20)
    cases = [
        (config_of("gemm_reduce_scatter", "none"), 2048, 1024, 264),
        (config_of("gemm_all_reduce", "staged", (64, 64)), 65, 520, 72),
        (config_of("gemm_all_reduce", "direct", (128, 128)), 1000, 1032, 136),
        (config_of("gemm_all_reduce", "staged"), 1, 8, 8),
    ]
    runs = []
    for round_idx in range(6):
        for config, m, n, k in cases:
            inputs = [random_input(rank, 0, m, n, k, config, round_idx, True) for rank in range(2)]
            outs = nan_outputs(group, m // 2 if config.operator == "gemm_reduce_scatter" else m, n, config)
            runs.append((config, inputs, outs, group.prepare(config, inputs, outs)))
    group.synchronize()
    for i, (_, _, _, launches) in enumerate(runs):
        if i % 5 == 0:
            group.delay(i % 2)
        group.run(launches)
    group.synchronize()
    group.check()
    for i, (config, inputs, outs, _) in enumerate(runs):
        truth, _ = summed(inputs, config, "cuda:0")
        for rank, out in enumerate(outs):
            assert_bitwise(out, expected_of(config, rank, 2, truth), f"run {i} {config.name} rank {rank}")


@BOTH
def test_average(operator: str, broadcast: str) -> None:
    group, config = group_of((0, 0)), config_of(operator, broadcast)
    inputs = [random_input(rank, 0, 512, 520, 264, config) for rank in range(2)]
    outs = nan_outputs(group, 256 if operator == "gemm_reduce_scatter" else 512, 520, config)
    launches = group.prepare(config, inputs, outs, scale=0.5)
    group.synchronize()
    group.run(launches)
    group.synchronize()
    group.check()
    truth, baseline = summed(inputs, config, "cuda:0")
    for rank, out in enumerate(outs):
        assert_close(out, *(expected_of(config, rank, 2, x / 2) for x in (truth, baseline)))


@BOTH
def test_graph_replays_with_changed_inputs(operator: str, broadcast: str) -> None:
    check_replays(group_of((0, 0)), config_of(operator, broadcast), 512, 520, 264, replays=10)


@ONE_AND_TWO_GPUS
@BOTH
@pytest.mark.parametrize("late", [[], [0], [1]], ids=str)
def test_two_ranks(operator: str, broadcast: str, late: list[int], devices: tuple[int, ...]) -> None:
    group = group_of(devices)
    check(group, config_of(operator, broadcast), 4096, 2048, 1024, epochs=5, late=late)
    check(group, config_of(operator, broadcast, (128, 128)), 2 * 999, 1032, 328, epochs=5, late=late)


@ONE_AND_TWO_GPUS
@BOTH
def test_model_sizes(operator: str, broadcast: str, devices: tuple[int, ...]) -> None:
    group = RankGroup(devices, arena_bytes=600 << 20)
    check(group, config_of(operator, broadcast), 8192, 8192, 1024, epochs=4)
    check(group, config_of(operator, broadcast), 4097 * 2, 4096, 1032, epochs=4)
