"""The order of an all-gather: every tile and every chunk once, flags for all of them, and no state that is stuck."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from math import ceil

import pytest

from mkcompile.runtime.gather_abi import APART, CHUNK_BYTES, COLUMNS, TOGETHER
from mkcompile.runtime.gather_launch import GatherSchedule, GatherSize
from mkcompile.runtime.kernel_config import KernelConfig

from .gather_order import chunks_of, tiles_of, turns_of

CONFIG = KernelConfig(operator="all_gather_gemm", block_m=128, block_n=128)
ORDERS = {"apart": APART, "together": TOGETHER, "columns": COLUMNS}


def size_of(order: int, world: int, rows: int = 300, segments: int = 1, k: int = 192) -> GatherSize:
    """Two weights of different widths."""
    return GatherSize(segment_rows=rows, segments=segments, k=k, n=(264, 136), world=world, columns=order == COLUMNS)


def schedules(order: int, positions: int) -> list[GatherSchedule]:
    """Grids, numbers of pushing blocks, and places where they join."""
    return [
        GatherSchedule(grid=grid, blocks=blocks, group_rows=group_rows, join=join, order=order, raster_group=2)
        for grid, blocks in ((2, 1), (7, 3), (40, 4))
        for group_rows in (128, 100)
        for join in (0, 5, positions)
    ]


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("world", [2, 3, 8])
def test_every_tile_of_every_product_is_computed_once(order: int, world: int) -> None:
    for rows, segments in ((300, 1), (128, 3), (1, 1), (5, 2)):
        if segments > 1 and order != APART:
            continue
        size = size_of(order, world, rows, segments)
        rough = GatherSchedule(grid=2, blocks=1, group_rows=128, join=0, order=order)
        positions = rough.positions(CONFIG, size)
        for schedule, rank in product(schedules(order, positions), (0, world - 1)):
            places = [place for block in range(schedule.grid) for place in tiles_of(size, schedule, rank, block)]
            assert sorted(place.position for place in places) == list(range(positions))
            targets = Counter((place.weight, place.column, place.run, place.out_row) for place in places)
            assert len(targets) == positions
            for place in places:
                assert place.row <= place.last_row < (size.rows if order != APART else size.shard_rows)
                if order == APART:
                    segment = place.row // size.segment_rows
                    assert place.run == segment * world + place.owner
                    assert place.last_row // size.segment_rows == segment
                    assert place.out_row == place.row - segment * size.segment_rows


def test_own_rows_come_first_and_the_others_by_rank() -> None:
    size, schedule = size_of(APART, 4), GatherSchedule(grid=2, blocks=1, group_rows=128, join=1000)
    owners = [place.owner for place in tiles_of(size, schedule, 2, 1)]
    assert list(dict.fromkeys(owners)) == [2, 3, 0, 1]


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("world", [2, 5])
def test_every_byte_is_pushed_once_to_every_rank(order: int, world: int) -> None:
    first_step = 0 if order == TOGETHER else 1
    for rows, k, blocks, group_rows in product((1, 127, 700), (64, 1000), (1, 3, 8), (128, 48)):
        size = GatherSize(segment_rows=rows, k=k, n=(8,), world=world, columns=order == COLUMNS)
        schedule = GatherSchedule(grid=9, blocks=blocks, group_rows=group_rows, join=0, order=order)
        pushed: Counter[tuple[int, int]] = Counter()
        for block in range(blocks):
            chunks = chunks_of(size, schedule, first_step, block)
            for chunk in chunks:
                assert 0 < chunk.num_bytes <= CHUNK_BYTES and chunk.num_bytes % 16 == 0
                assert chunk.group == chunk.offset // (group_rows * k * 2)
                pushed[chunk.step, chunk.offset] += chunk.num_bytes
            turns = turns_of(size, schedule, first_step, block)
            counts = Counter((chunk.step, chunk.group) for chunk in chunks)
            assert all(counts[step, group] == count for step, group, count in turns)
            assert len(turns) == ceil(rows / group_rows) * (world - first_step)
            assert len({(step, group) for step, group, _ in turns}) == len(turns)
            done = [(chunk.step, chunk.group) for chunk in chunks]
            order_of = {(step, group): i for i, (step, group, _) in enumerate(turns)}
            assert [order_of[one] for one in done] == sorted(order_of[one] for one in done)
        for step in range(first_step, world):
            assert sum(size_ for (at, _), size_ in pushed.items() if at == step) == size.shard_bytes


Flag = tuple[int, int, int, int]  # at rank, from rank, group, part


def stuck_blocks(size: GatherSize, schedule: GatherSchedule, grids: Sequence[int], computes_first: bool = False) -> int:
    """Blocks that can never finish. A block that pushes does so first, then copies, then computes, as the kernel does;
    every wait is for a flag that stays raised, so that running whoever can until nobody can decides it.
    """
    world, apart = size.world, schedule.order == APART
    first_step = 0 if schedule.order == TOGETHER else 1
    blocks: list[list[tuple[list[Flag], list[Flag]]]] = []
    last = (size.shard_rows - 1) // schedule.group_rows
    parts = range(schedule.blocks)
    for rank, grid in enumerate(grids):
        for block in range(grid):
            moves: list[tuple[list[Flag], list[Flag]]] = []
            if block < schedule.blocks:
                for step, group, _ in turns_of(size, schedule, first_step, block):
                    moves.append(([], [((rank - step) % world, rank, group, block)]))
                for step, group, _ in turns_of(size, schedule, 1, block):
                    moves.append(([(rank, (rank + step) % world, group, part) for part in parts], []))
            own = GatherSchedule(
                grid=grid, blocks=schedule.blocks, group_rows=schedule.group_rows, join=schedule.join,
                order=schedule.order,
            )  # fmt: skip
            tiles: list[tuple[list[Flag], list[Flag]]] = []
            for place in tiles_of(size, own, rank, block):
                sources = [place.owner] if apart else list(range(world))
                group = place.last_row // schedule.group_rows if schedule.order != TOGETHER else last
                needs = [
                    (rank, source, group, part)
                    for source in sources
                    if source != rank or schedule.order == TOGETHER
                    for part in parts
                ]
                tiles.append((needs, []))
            blocks.append(tiles + moves if computes_first else moves + tiles)
    raised: set[Flag] = set()
    done = [0] * len(blocks)
    moved = True
    while moved:
        moved = False
        for i, steps in enumerate(blocks):
            while done[i] < len(steps) and all(flag in raised for flag in steps[done[i]][0]):
                raised.update(steps[done[i]][1])
                done[i] += 1
                moved = True
    return sum(done[i] < len(steps) for i, steps in enumerate(blocks))


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_nothing_gets_stuck(order: int, world: int) -> None:
    for rows, group_rows, join in product((100, 600), (128, 64), (0, 4, 1000)):
        size = size_of(order, world, rows)
        schedule = GatherSchedule(grid=5, blocks=2, group_rows=group_rows, join=join, order=order)
        for grids in ((3,) * world, (5,) * world, tuple(3 + rank for rank in range(world))):
            assert stuck_blocks(size, schedule, grids) == 0, (rows, group_rows, join, grids)


def test_blocks_that_compute_before_they_push_get_stuck() -> None:
    size, schedule = size_of(APART, 2), GatherSchedule(grid=3, blocks=2, group_rows=128, join=0)
    assert stuck_blocks(size, schedule, (3, 3)) == 0
    assert stuck_blocks(size, schedule, (3, 3), computes_first=True) > 0
