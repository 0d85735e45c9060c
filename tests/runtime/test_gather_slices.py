"""The copy engine's slices of k: every byte once, a flag behind each, and when tiles that wait for them end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mkcompile.plan.arrivals import EngineWork
from mkcompile.runtime.gather_abi import ENGINE_COPIES
from mkcompile.runtime.gather_engine import EnginePlaces, transfers
from mkcompile.runtime.gather_launch import GatherSchedule, GatherSize
from mkcompile.runtime.gather_schedule import push_choice, shared_choice
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.workspace_layout import WorkspaceLayout


@pytest.mark.parametrize(("k", "slices"), [(1024, 4), (576, 4), (520, 3)])
def test_slices_of_k_cover_every_shard_once_and_each_has_a_flag(k: int, slices: int) -> None:
    size = GatherSize(segment_rows=300, k=k, n=(8,), world=3)
    choice = GatherSchedule(grid=8, group_rows=256, mover=ENGINE_COPIES, slices=slices)
    layout = WorkspaceLayout(world=3, total_bytes=64 << 20, max_tiles=64)
    places = EnginePlaces(
        rank=1, layout=layout, workspaces=(1 << 40, 2 << 40, 3 << 40), areas=(10 << 40, 20 << 40, 30 << 40)
    )
    copies = transfers(5 << 40, size, choice, places)
    data, flags = copies[::2], copies[1::2]
    assert len(data) == len({one.target for one in flags}) == 2 * choice.flags(size)
    for peer, slot in ((0, 0), (2, 1)):
        begin = ((peer + 1) * 10 << 40) + slot * size.shard_bytes
        mine = [one for one in data if one.target >> 40 == (peer + 1) * 10]
        assert all(one.target - begin == one.source - (5 << 40) and one.pitch == 2 * k for one in mine)
        pieces = [(one.target - begin + row * one.pitch, one.num_bytes) for one in mine for row in range(one.rows)]
        assert sum(num_bytes for _, num_bytes in pieces) == size.shard_bytes
        ends = [0, *sorted(start + num_bytes for start, num_bytes in pieces)]
        assert [start for start, _ in sorted(pieces)] == ends[:-1]


def work(**others: float) -> EngineWork:
    """8192x1280x8192 in tiles of 128x160 on two ranks. Source: benchmarks/results/2xh200/gather_sweep_87a4b34.jsonl."""
    known = {
        "positions": 512,
        "own": 256,
        "grid": 128,
        "tile_us": 57.2,
        "sent_us": 183.4,
        "start_us": 4.0,
        "chunk_us": 6.0,
    }
    return EngineWork(**(known | others))  # type: ignore[arg-type]


def test_a_wave_begins_with_the_first_slice_of_its_rows_and_ends_a_slice_after_the_last() -> None:
    whole, halves = work().us(2), work().us(2, 2)
    assert whole == pytest.approx(4 + 183.4 + 12 + 57.2)
    assert halves == pytest.approx(4 + 183.4 + 24 + 57.2 / 2)
    assert work(sent_us=10.0).us(1, 2) == work(sent_us=10.0).us(1) == pytest.approx(4 * 57.2)


def test_slices_are_taken_where_they_end_sooner_and_no_more_than_there_are_pieces() -> None:
    assert work().best(4)[1:] == (2, 2)
    assert work().best(1)[1:] == (1, 1)
    assert work(sent_us=10.0).best(4)[1:] == (1, 1)


def test_a_paced_push_takes_no_more_blocks_than_have_tiles_or_images() -> None:
    config = KernelConfig(operator="all_gather_gemm", block_m=64, block_n=64)
    small = GatherSize(segment_rows=640, k=64, n=(64,), world=2)
    large = replace(small, segment_rows=1024, k=8192)
    assert push_choice(config, small, 116, returned=False).schedule.grid == 20
    assert push_choice(config, large, 116, returned=False).schedule.grid == 116  # 32 tiles, 2048 images
    shared = KernelConfig(operator="all_gather_gemm", block_n=160)
    assert shared_choice(shared, replace(large, n=(1280,)), 128).schedule.grid == 128
    assert shared_choice(shared, replace(large, n=(1280,)), 116).schedule.grid == 108  # 54 pairs of SMs are sure
