"""All-gather + GEMM with virtual ranks on one GPU, and with two GPUs where there are two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from mkcompile.runtime.gather_abi import APART, TOGETHER
from mkcompile.runtime.gather_launch import GatherSchedule, GatherSize
from mkcompile.runtime.gather_schedule import (
    GatherChoice,
    engine_choice,
    gather_order,
    library_choice,
    push_choice,
    read_choice,
    shared_choice,
)
from mkcompile.runtime.kernel_config import KernelConfig

from .gather_calls import Call, Engines, run_back_to_back
from .marks import ONE_AND_TWO_GPUS
from .ranks import TORCH_DTYPES, RankGroup, nan_outputs, random_input
from .truth import assert_bitwise, summed

ROWS = (1, 2, 16, 17, 63, 64, 65, 127, 128, 129, 255, 1000, 2048, 4097, 8192)
WORLDS = pytest.mark.parametrize("world", [2, 4, 8])
ENGINE = pytest.mark.parametrize("variant", ["copy_engine", "library"])


@cache
def group_of(devices: tuple[int, ...]) -> RankGroup:
    """One group for all tests on the same devices: they share its workspaces, as operators of a model do."""
    return RankGroup(devices, arena_bytes=160 << 20)


@cache
def engines_of(devices: tuple[int, ...]) -> Engines:
    """The copy engines of that group."""
    return Engines(group_of(devices), area_bytes=32 << 20)


def config_of(tile: tuple[int, int] = (128, 256), **others: Any) -> KernelConfig:
    """A configuration."""
    return KernelConfig(operator="all_gather_gemm", block_m=tile[0], block_n=tile[1], **others)


def rows_of(rows: int, world: int, n: tuple[int, ...] = (1032,), k: int = 520, **others: Any) -> GatherSize:
    """Sizes of one all-gather of rows."""
    return GatherSize(segment_rows=rows, k=k, n=n, world=world, **others)


def choice_of(group: RankGroup, config: KernelConfig, size: GatherSize, variant: str, returned: bool) -> GatherChoice:
    """The runtime's own, on a grid that leaves room for the other ranks of the GPU."""
    config = replace(config, returns=returned)
    if config.split > 1:
        return shared_choice(config, size, group.max_grid())
    if variant == "push":
        return push_choice(config, size, group.max_grid(), returned)
    if variant == "remote_read":
        return read_choice(config, size, group.max_grid())
    if variant == "library":
        return library_choice(config, size)
    return engine_choice(config, size, group.max_grid())


def run(
    devices: tuple[int, ...], config: KernelConfig, size: GatherSize, *, variant: str = "push", epochs: int = 3,
    late: Sequence[int] = (), returned: bool = False, schedule: GatherSchedule | None = None,
) -> None:  # fmt: skip
    """Back-to-back launches with different inputs, then all checked."""
    group = group_of(devices)
    choice = choice_of(group, config, size, variant, returned)
    if schedule is not None:
        choice = replace(choice, schedule=schedule)
    engines = engines_of(devices) if choice.schedule.by_engine else None
    calls = [
        Call.make(group, choice, size, seed=epoch, integers=epoch % 2 == 1, returned=returned, engines=engines)
        for epoch in range(epochs)
    ]
    run_back_to_back(group, calls, late, variant)


@WORLDS
@pytest.mark.parametrize("returned", [False, True], ids=["", "returned"])
def test_products_of_all_shards(world: int, returned: bool) -> None:
    run((0,) * world, config_of(), rows_of(1024, world), returned=returned)


@pytest.mark.parametrize("rows", ROWS)
def test_any_number_of_rows(rows: int) -> None:
    for tile in ((64, 64), (128, 256)) if rows < 1000 else ((128, 256),):
        run((0, 0), config_of(tile), rows_of(rows, 2, (520,), 264), returned=rows % 2 == 1)


@pytest.mark.parametrize("rows", [1, 17, 64, 200])
@WORLDS
def test_few_rows_in_either_order(rows: int, world: int) -> None:
    devices, config, size = (0,) * world, config_of((64, 64)), rows_of(rows, world, (520,), 264)
    for order in (APART, TOGETHER):
        plan = push_choice(config, size, group_of(devices).max_grid(), True).schedule
        run(devices, config, size, returned=True, schedule=replace(plan, order=order))


@pytest.mark.parametrize("tile", [(64, 128), (64, 256), (128, 128), (128, 160), (128, 192), (128, 224)], ids=str)
def test_every_tile(tile: tuple[int, int]) -> None:
    for layout in ("nk", "kn"):
        for dtype in TORCH_DTYPES:
            config = config_of(tile, weight_layout=layout, dtype=dtype)
            run((0, 0), config, rows_of(600, 2, (776,), 200), epochs=2)


@WORLDS
def test_several_weights_with_and_without_bias(world: int) -> None:
    size = rows_of(300, world, (520, 8, 264, 1032), 328)
    for layout in ("nk", "kn"):
        run((0,) * world, config_of((128, 128), has_bias=True, weight_layout=layout), size, returned=True)


@WORLDS
def test_rows_in_segments(world: int) -> None:
    for rows in (200, 256, 7):
        run((0,) * world, config_of((128, 128)), rows_of(rows, world, segments=3), returned=True)


@WORLDS
@pytest.mark.parametrize("rows", [5, 300])
def test_columns(world: int, rows: int) -> None:
    size = GatherSize(segment_rows=rows, k=192, n=(264, 520), world=world, columns=True)
    for layout in ("nk", "kn"):
        run((0,) * world, config_of((128, 128), weight_layout=layout), size, returned=True)


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("variant", ["push", "remote_read", "copy_engine", "library"])
def test_load_waits_when_a_peer_is_late(late: int, variant: str) -> None:
    returned = variant in ("push", "copy_engine")
    run((0, 0), config_of(), rows_of(1536, 2), variant=variant, epochs=5, late=[late], returned=returned)


@pytest.mark.parametrize("grid", [1, 3, 40])
@pytest.mark.parametrize("band", [1, 5])
def test_images_of_any_band_on_any_grid(grid: int, band: int) -> None:
    config, size = config_of((64, 64)), rows_of(520, 2, k=200)
    assert gather_order(size) == APART
    run((0, 0), config, size, returned=True, schedule=GatherSchedule(grid=grid, image_rows=64, band=band))


@pytest.mark.parametrize("returned", [False, True])
def test_copy_engine_in_slices_of_k(returned: bool) -> None:
    for rows, k, slices, tile in ((520, 1024, 4, (128, 128)), (700, 520, 3, (128, 160)), (1000, 576, 3, (64, 64))):
        config, size = config_of(tile), rows_of(rows, 2, k=k)
        chosen = engine_choice(config, size, 40).schedule
        for group_rows in (256, 1024):
            schedule = replace(chosen, group_rows=group_rows, slices=slices)
            run((0, 0), config, size, returned=returned, schedule=schedule)
    size = GatherSize(segment_rows=300, k=192, n=(264, 520), world=2, columns=True)
    chosen = engine_choice(config_of((128, 128)), size, 40).schedule
    run((0, 0), config_of((128, 128)), size, returned=returned, schedule=replace(chosen, slices=3))


@pytest.mark.parametrize("returned", [False, True])
def test_images_that_are_sent_at_a_pace(returned: bool) -> None:
    config, size = config_of((64, 64)), rows_of(520, 2, k=200)
    for pace_ns, fenced in ((40, 1), (2000, 1), (40, 2), (500, 3)):
        schedule = GatherSchedule(grid=40, image_rows=64, pace_ns=pace_ns, fenced=fenced)
        run((0, 0), config, size, returned=returned, schedule=schedule)


@pytest.mark.parametrize("tile", [(128, 128), (128, 160)], ids=str)
def test_tiles_that_two_blocks_share(tile: tuple[int, int]) -> None:
    for layout in ("nk", "kn"):
        config = config_of(tile, weight_layout=layout, has_bias=layout == "kn", split=2)
        for rows, k in ((300, 520), (1000, 192), (1, 72), (2048, 1024)):
            run((0, 0), config, rows_of(rows, 2, (1032, 264), k))
    run((0, 0), config_of(tile, split=2), rows_of(200, 2, segments=3))
    size = GatherSize(segment_rows=300, k=192, n=(264, 520), world=2, columns=True)
    run((0, 0), config_of(tile, split=2), size)


@pytest.mark.parametrize("late", [0, 1])
def test_tiles_that_two_blocks_share_wait_for_a_peer(late: int) -> None:
    run((0, 0), config_of((128, 160), split=2), rows_of(1536, 2), epochs=5, late=[late])


@WORLDS
@pytest.mark.parametrize("rows", [1, 130, 700])
def test_peers_read_rows_in_place(world: int, rows: int) -> None:
    run((0,) * world, config_of(), rows_of(rows, world, (264,)), variant="remote_read", epochs=4)


def test_peers_read_segments_and_columns_in_place() -> None:
    run((0, 0), config_of((128, 128)), rows_of(200, 2, segments=3), variant="remote_read")
    size = GatherSize(segment_rows=300, k=192, n=(264, 520), world=2, columns=True)
    run((0, 0), config_of((64, 128)), size, variant="remote_read")


@ENGINE
@pytest.mark.parametrize("rows", [1, 17, 129, 1000, 4097, 8192])
def test_copy_engine_with_any_number_of_rows(variant: str, rows: int) -> None:
    run((0, 0), config_of((128, 128), has_bias=True), rows_of(rows, 2, (520, 264), 264), variant=variant)


@ENGINE
def test_copy_engine_in_chunks(variant: str) -> None:
    config, size = config_of((128, 128)), rows_of(1000, 2)
    chosen = choice_of(group_of((0, 0)), config, size, variant, False).schedule
    run((0, 0), config, size, variant=variant, schedule=replace(chosen, group_rows=256), epochs=6)


def test_copy_engine_with_segments_columns_and_gathered_tensor() -> None:
    run((0, 0), config_of((128, 128)), rows_of(200, 2, segments=3), variant="copy_engine", returned=True)
    size = GatherSize(segment_rows=300, k=192, n=(264, 520), world=2, columns=True)
    run((0, 0), config_of((128, 128)), size, variant="copy_engine", returned=True)


@ENGINE
def test_copy_engine_of_three_ranks(variant: str) -> None:
    run((0, 0, 0), config_of((128, 128)), rows_of(300, 3), variant=variant, epochs=4)


def test_variants_and_reductions_alternate_on_one_workspace() -> None:
    devices = (0, 0)
    group, engines = group_of(devices), engines_of(devices)
    reducing = [
        KernelConfig(operator="gemm_reduce_scatter", block_m=128, block_n=128),
        KernelConfig(operator="gemm_all_reduce", broadcast="staged", block_m=64, block_n=64),
    ]
    runs: list[Any] = []
    for round_idx in range(5):
        for variant, rows in (
            ("push", 512),
            ("copy_engine", 700),
            ("remote_read", 140),
            ("push", 33),
            ("library", 256),
        ):
            config, size = config_of((128, 128)), rows_of(rows, 2, (520,), 264)
            choice = choice_of(group, config, size, variant, False)
            beside = engines if choice.schedule.by_engine else None
            runs.append(Call.make(group, choice, size, seed=round_idx, integers=True, engines=beside))
            config = reducing[len(runs) % 2]
            inputs = [random_input(rank, 0, 512, 264, 136, config, round_idx, True) for rank in range(2)]
            outs = nan_outputs(group, 256 if config.operator == "gemm_reduce_scatter" else 512, 264, config)
            runs.append((config, inputs, outs, group.prepare(config, inputs, outs)))
    group.synchronize()
    for i, one in enumerate(runs):
        if i % 5 == 0:
            group.delay(i // 5 % 2)
        if isinstance(one, Call):
            one.run(group)
        else:
            group.run(one[3])
    group.synchronize()
    group.check()
    for i, one in enumerate(runs):
        if isinstance(one, Call):
            one.check(True, f"run {i}")
            continue
        config, inputs, outs, _ = one
        truth, _ = summed(inputs, config, "cuda:0")
        for rank, out in enumerate(outs):
            wanted = truth if config.operator == "gemm_all_reduce" else truth.view(2, 256, 264)[rank]
            assert_bitwise(out, wanted, f"run {i} {config.name} rank {rank}")


@pytest.mark.parametrize("variant", ["push", "remote_read", "copy_engine", "library"])
def test_graph_replays_with_changed_inputs(variant: str) -> None:
    devices, config, size = (0, 0), config_of((128, 128)), rows_of(300, 2)
    group = group_of(devices)
    choice = choice_of(group, config, size, variant, False)
    engines = engines_of(devices) if choice.schedule.by_engine else None
    call = Call.make(group, choice, size, engines=engines)
    call.run(group)  # libraries allocate what they need
    group.synchronize()
    graphs = []
    for rank in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=group.streams[rank]):
            call.prepared[rank].run(call.tensors[rank], torch.cuda.current_stream().cuda_stream, True)
        graphs.append(graph)
    for replay in range(10):
        fresh = Call.make(group, choice, size, seed=replay + 1, integers=True, engines=engines)
        for old, new in zip(call.tensors, fresh.tensors, strict=True):
            old.shard.copy_(new.shard)
            for target, source in zip(old.weights, new.weights, strict=True):
                target.copy_(source)
        torch.cuda.synchronize()
        for rank in range(2):
            with torch.cuda.stream(group.streams[rank]):
                graphs[rank].replay()
        group.synchronize()
        group.check()
        call.check(True, f"replay {replay}")


@ONE_AND_TWO_GPUS
@pytest.mark.parametrize("variant", ["push", "remote_read", "copy_engine", "library"])
@pytest.mark.parametrize("late", [[], [0], [1]], ids=str)
def test_two_ranks(late: list[int], variant: str, devices: tuple[int, ...]) -> None:
    returned = variant in ("push", "copy_engine")
    size = rows_of(2048, 2, (2048,), 1024)
    run(devices, config_of(), size, variant=variant, epochs=5, late=late, returned=returned)
    run(devices, config_of((128, 128)), rows_of(999, 2, (1032,), 328), variant=variant, epochs=5, late=late)
