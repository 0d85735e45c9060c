"""Streaming kernels: split k, one-shot exchange through mailboxes; virtual ranks on one GPU, and two GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from mkcompile.errors import PeerTimeoutError
from mkcompile.runtime.kernel_config import PING_PONG, SHARES_ENDS, KernelConfig
from mkcompile.runtime.stream_schedule import stream_configs
from mkcompile.runtime.tile_schedule import TileSchedule

from .broken_kernels import NO_CLEAR, NO_EXCHANGE, NO_MAIL
from .ranks import RankGroup, nan_outputs, random_input
from .test_negative_controls import load_broken
from .test_reductions import check, check_replays, config_of, expected_of, group_of
from .test_tile_gemm import run_gemm
from .truth import assert_bitwise, assert_close, baseline_product, product, summed

ROWS = (1, 2, 8, 16, 17, 32, 63, 64, 65, 127, 128, 129, 255, 256, 512, 1000, 1024)
OPERATORS = pytest.mark.parametrize("operator", ["gemm_reduce_scatter", "gemm_all_reduce"], ids=["rs", "ar"])
WORLDS = pytest.mark.parametrize("world", [2, 4, 8])
NUM_BLOCKS = 128


def stream_config(
    operator: str = "gemm", tile: tuple[int, int] = (64, 64), split: int = 1, **others: object
) -> KernelConfig:
    """A configuration."""
    return config_of(operator, "none", tile, streams=True, split=split, **others)


def grid_of(config: KernelConfig, m: int, n: int) -> TileSchedule:
    """All tiles at once, or as many blocks as there are; some begin in the middle of k."""
    tiles = -(-m // config.block_m) * -(-n // config.block_n)
    return TileSchedule(grid=min(tiles, NUM_BLOCKS // config.split) * config.split, lag=n % 3)


def check_gemm(config: KernelConfig, m: int, n: int, k: int, seed: int = 0) -> None:
    """Close on random inputs, exact on integers, the same bits twice."""
    what = f"{config.name} {m}x{n}x{k}"
    given, schedule = random_input(0, 0, m, n, k, config, seed), grid_of(config, m, n)
    out = run_gemm(config, given, schedule)
    assert_close(out, product(given, config, "cuda:0"), baseline_product(given, config, "cuda:0"), what)
    assert torch.equal(out, run_gemm(config, given, schedule)), f"{what}: another run, other bits"
    exact = random_input(0, 0, m, n, k, config, seed + 1, integers=True)
    assert_bitwise(run_gemm(config, exact, schedule), product(exact, config, "cuda:0"), what)


@pytest.mark.parametrize("one", stream_configs(KernelConfig()), ids=lambda one: one.name)
def test_every_tile_and_split(one: KernelConfig) -> None:
    for layout in ("nk", "kn"):
        for dtype in ("bfloat16", "float16"):
            config = replace(one, weight_layout=layout, dtype=dtype, has_bias=layout == "kn")  # type: ignore[arg-type]
            for m, n, k in ((60, 520, 520), (1, 8, 256), (777, 1032, 1000)):
                check_gemm(config, m, n, k)


@pytest.mark.parametrize("m", ROWS)
def test_any_number_of_rows_of_a_gemm(m: int) -> None:
    for tile, split, n in (((64, 64), 1, 1032), ((64, 64), 2, 1032), ((128, 64), 4, 1032), ((128, 128), 2, 2056)):
        check_gemm(stream_config(tile=tile, split=split), m, n, 520)


@pytest.mark.parametrize("activation", ["relu", "gelu_tanh", "silu"])
def test_activation_after_the_sum_over_the_cluster(activation: str) -> None:
    config = stream_config(tile=(64, 64), split=2, activation=activation, has_bias=True)
    given = random_input(0, 0, 33, 520, 264, config)
    functions = {
        "relu": torch.relu, "silu": torch.nn.functional.silu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    }  # fmt: skip
    truth, baseline = (functions[activation](f(given, config, "cuda:0")) for f in (product, baseline_product))
    assert_close(run_gemm(config, given, grid_of(config, 33, 520)), truth, baseline, config.name)


@OPERATORS
@pytest.mark.parametrize("m", ROWS)
def test_any_number_of_rows(operator: str, m: int) -> None:
    group = group_of((0, 0))
    rows = m * group.world if operator == "gemm_reduce_scatter" else m
    for tile, split, turns in (((64, 64), 1, 0), ((64, 64), 2, 0), ((128, 64), 1, 0), ((128, 128), 2, 1)):
        check(group, stream_config(operator, tile, split, ping_pong=bool(turns)), rows, 520, 264)
    for tile in ((128, 64), (64, 64)):
        check(group, stream_config(operator, tile, hands_over=True), rows, 520, 264)
    check(group, stream_config(operator, (64, 128), ping_pong=True), rows, 520, 264)


@OPERATORS
@WORLDS
def test_partials_handed_over_to_other_warps(operator: str, world: int) -> None:
    group = group_of((0,) * world)
    for m, n, tile, grid, band in (
        (256 * world, 512, (128, 128), 8, 2), (128 * world, 512, (128, 64), 4, 1), (100 * world, 520, (128, 64), 3, 1),
        (64 * world, 1032, (64, 128), 1, 1), (64 * world, 1024, (64, 128), 4, 1), (16, 520, (64, 128), 2, 1),
        (128 * world, 512, (64, 64), 4, 2), (96 * world, 520, (64, 64), 1, 1),
    ):  # fmt: skip
        config = stream_config(operator, tile, hands_over=True)
        for pace_ns in (0, 300):
            schedule = TileSchedule(grid=grid, raster_group=band, pace_ns=pace_ns)
            check(group, config, m, n, 264, epochs=4, schedule=schedule, late=[world - 1])
    ends = [(*SHARES_ENDS, True)] if operator == "gemm_all_reduce" else []
    for tile, split, shares_ends in (*((*form, False) for form in PING_PONG), *ends):
        turns = stream_config(operator, tile, split, ping_pong=True, shares_ends=shares_ends)
        for grid, band, n in ((4, 1, 1032), (1, 1, 1024), (2, 2, 1024)):  # even and odd numbers of tiles a cluster
            schedule = TileSchedule(grid=grid * split, raster_group=band)
            check(group, turns, tile[0] * world, n, 264, epochs=4, schedule=schedule, late=[0])


@OPERATORS
@WORLDS
def test_worlds(operator: str, world: int) -> None:
    group = group_of((0,) * world)
    for m, n, tile, split in ((world, 8, (64, 64), 1), (8 * world, 520, (64, 64), 2), (200, 520, (128, 128), 1),
                              (200, 520, (64, 128), 4), (40 * world, 1032, (64, 64), 1)):  # fmt: skip
        check(group, stream_config(operator, tile, split), m, n, 328, epochs=4)


@OPERATORS
def test_every_tile_split_layout_and_dtype(operator: str) -> None:
    for one in stream_configs(KernelConfig(operator="gemm_reduce_scatter")):
        for layout, dtype in (("nk", "bfloat16"), ("kn", "float16")):
            config = stream_config(
                operator,
                (one.block_m, one.block_n),
                one.split,
                weight_layout=layout,
                dtype=dtype,
                has_bias=layout == "kn",
            )
            check(group_of((0, 0)), config, 60, 264, 264, epochs=2)


@OPERATORS
@pytest.mark.parametrize("late", [0, 1])
def test_sum_waits_when_a_peer_is_late(operator: str, late: int) -> None:
    for split in (1, 2):
        check(group_of((0, 0)), stream_config(operator, split=split), 64, 520, 264, epochs=6, late=[late])


@WORLDS
def test_rows_in_segments(world: int) -> None:
    for rows in (1, 5, 16, 24):
        config = stream_config("gemm_reduce_scatter")
        check(group_of((0,) * world), config, 3 * world * rows, 264, 136, segments=3)


def test_few_and_many_rows_alternate_on_one_workspace() -> None:
    group = RankGroup((0, 0), arena_bytes=64 << 20)
    cases = [
        (stream_config("gemm_all_reduce"), 8, 520, 264),
        (config_of("gemm_all_reduce", "staged", (64, 64)), 65, 520, 72),
        (stream_config("gemm_reduce_scatter", split=2), 34, 264, 136),
        (stream_config("gemm_all_reduce", (128, 64), 2, ping_pong=True), 200, 520, 264),
        (config_of("gemm_reduce_scatter", "none"), 2048, 1024, 264),
        (stream_config("gemm_all_reduce", (64, 128), 4), 1, 264, 520),
        (stream_config("gemm_reduce_scatter", (128, 64), hands_over=True), 512, 1024, 264),
    ]
    runs = []
    for round_idx in range(5):
        for config, m, n, k in cases:
            inputs = [random_input(rank, 0, m, n, k, config, round_idx, True) for rank in range(2)]
            outs = nan_outputs(group, m // 2 if config.operator == "gemm_reduce_scatter" else m, n, config)
            runs.append((config, inputs, outs, group.prepare(config, inputs, outs)))
    group.synchronize()
    for i, (_, _, _, launches) in enumerate(runs):
        if i % 7 == 0:
            group.delay(i % 2)
        group.run(launches)
    group.synchronize()
    group.check()
    for i, (config, inputs, outs, _) in enumerate(runs):
        truth, _ = summed(inputs, config, "cuda:0")
        for rank, out in enumerate(outs):
            assert_bitwise(out, expected_of(config, rank, 2, truth), f"run {i} {config.name} rank {rank}")
    for rank, workspace in enumerate(group.workspaces):
        mailboxes = workspace[group.layout.mailbox_offset : group.layout.region_offset]
        assert not mailboxes.any(), f"rank {rank}: words left in a mailbox"


@OPERATORS
def test_graph_replays_with_changed_inputs(operator: str) -> None:
    group = group_of((0, 0))
    check_replays(group, stream_config(operator, split=2), 32, 520, 264, replays=20, launches_of_graph=3)


@OPERATORS
@pytest.mark.parametrize(("world", "missing"), [(2, 0), (2, 1), (4, 2)])
def test_peer_that_never_launches_is_named(operator: str, world: int, missing: int) -> None:
    group, config = RankGroup((0,) * world, timeout_s=0.5), stream_config(operator)
    inputs = [random_input(rank, 0, 64, 520, 264, config) for rank in range(world)]
    outs = nan_outputs(group, 64 // world if operator == "gemm_reduce_scatter" else 64, 520, config)
    launches = group.prepare(config, inputs, outs)
    present = [rank for rank in range(world) if rank != missing]
    group.run(launches, present)
    group.synchronize()
    for rank in present:
        with pytest.raises(PeerTimeoutError) as caught:
            group.faults[rank].check()
        report = caught.value.report
        assert (report.operator, report.rank, report.peer) == (operator, rank, missing), str(report)
    group.run(launches, present)  # an aborted workspace runs nothing, and does not hang
    group.synchronize()


def broken_outputs(
    group: RankGroup, config: KernelConfig, defect: tuple[str, str, str], epochs: int, late: Sequence[int]
) -> bool:
    """Whether the results of a kernel with a planted defect are all right."""
    launches, expected, results = [], [], []
    kernels = [load_broken(config, 0, defect)] * 2
    for epoch in range(epochs):
        inputs = [random_input(rank, 0, 64, 520, 1032, config, epoch, True) for rank in range(2)]
        outs = nan_outputs(group, 32 if config.operator == "gemm_reduce_scatter" else 64, 520, config)
        launches.append(group.prepare(config, inputs, outs, kernels=kernels))
        expected.append(summed(inputs, config, "cuda:0")[0])
        results.append(outs)
    group.synchronize()
    for launch in launches:
        for rank in late:
            group.delay(rank)
        group.run(launch)
    group.synchronize()
    return all(
        torch.equal(out.float(), expected_of(config, rank, 2, truth))
        for truth, outs in zip(expected, results, strict=True)
        for rank, out in enumerate(outs)
    )


@OPERATORS
def test_planted_defects_are_noticed(operator: str) -> None:
    assert not broken_outputs(RankGroup((0, 0)), stream_config(operator), NO_MAIL, 2, [1]), "no wait for the words"
    assert not broken_outputs(RankGroup((0, 0)), stream_config(operator), NO_CLEAR, 4, [1]), "words not given back"
    split = stream_config(operator, (64, 64), 2)
    assert not broken_outputs(RankGroup((0, 0)), split, NO_EXCHANGE, 2, []), "no wait for the cluster"


@pytest.mark.gpu2
@OPERATORS
@pytest.mark.parametrize("late", [[], [0], [1]], ids=str)
def test_two_gpus(operator: str, late: list[int]) -> None:
    group = group_of((0, 1))
    for m, tile, split, turns in (
        (2, (64, 64), 1, False), (34, (64, 64), 2, False), (128, (128, 64), 2, True), (500, (128, 128), 1, True),
        (400, (128, 128), 1, False), (256, (128, 128), 4, True),
    ):  # fmt: skip
        config = stream_config(operator, tile, split, ping_pong=turns)
        check(group, config, m, 4096, 1032, epochs=5, late=late)
    for m, tile, band, grid in ((512, (128, 64), 2, 128), (1024, (128, 128), 4, 128), (500, (64, 128), 1, 90)):
        schedule = TileSchedule(grid=grid, raster_group=band, pace_ns=300)
        check(
            group, stream_config(operator, tile, hands_over=True), m, 4096, 1032, epochs=5, late=late, schedule=schedule
        )
    if operator == "gemm_all_reduce":
        config, schedule = (
            stream_config(operator, *SHARES_ENDS, ping_pong=True, shares_ends=True),
            TileSchedule(grid=128),
        )
        for m in (512, 640, 1000):
            check(group, config, m, 4096, 1032, epochs=5, late=late, schedule=replace(schedule, pace_ns=m % 512))
