"""The order of an all-gather: every tile and every image once, a flag for each, and no state that is stuck."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from math import ceil

import pytest

from mkcompile.runtime.gather_abi import APART, COLUMNS, TOGETHER
from mkcompile.runtime.gather_launch import GatherSchedule, GatherSize
from mkcompile.runtime.kernel_config import KernelConfig

from .gather_order import Image, Place, images_of, sent_by, tiles_of

CONFIG = KernelConfig(operator="all_gather_gemm", block_m=128, block_n=128)
ORDERS = {"apart": APART, "together": TOGETHER, "columns": COLUMNS}
in_every_order = pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)


def size_of(order: int, world: int, rows: int = 300, segments: int = 1, k: int = 192) -> GatherSize:
    """Two weights of different widths."""
    return GatherSize(segment_rows=rows, segments=segments, k=k, n=(264, 136), world=world, columns=order == COLUMNS)


def schedules(order: int) -> list[GatherSchedule]:
    """Grids and bands."""
    return [
        GatherSchedule(grid=grid, band=band, order=order, raster_group=2) for grid, band in ((2, 1), (7, 3), (40, 16))
    ]


@in_every_order
@pytest.mark.parametrize("world", [2, 3, 8])
def test_every_tile_of_every_product_is_computed_once(order: int, world: int) -> None:
    for rows, segments in ((300, 1), (128, 3), (1, 1), (5, 2)):
        if segments > 1 and order != APART:
            continue
        size = size_of(order, world, rows, segments)
        positions = GatherSchedule(grid=2, order=order).positions(CONFIG, size)
        for schedule, rank in product(schedules(order), (0, world - 1)):
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
    size, schedule = size_of(APART, 4), GatherSchedule(grid=2)
    owners = [place.owner for place in tiles_of(size, schedule, 2, 1)]
    assert list(dict.fromkeys(owners)) == [2, 3, 0, 1]


@in_every_order
@pytest.mark.parametrize("world", [2, 5])
def test_every_row_of_a_shard_is_in_one_image_of_each_k_block(order: int, world: int) -> None:
    for rows, segments, k, band in product((1, 127, 128, 700), (1, 3), (64, 1000), (1, 3, 8)):
        if segments > 1 and order != APART:
            continue
        size = GatherSize(segment_rows=rows, segments=segments, k=k, n=(8,), world=world, columns=order == COLUMNS)
        schedule = GatherSchedule(grid=9, band=band, order=order)
        for source in (0, world - 1):
            images = images_of(size, schedule, source, first_step=1, steps=2)
            assert [one.step for one in images] == [1] * (len(images) // 2) + [2] * (len(images) // 2)
            images = images[: len(images) // 2]
            held = Counter((one.row + row, one.k_block) for one in images for row in rows_of(one))
            assert set(held) == set(product(range(size.shard_rows), range(ceil(k / 64)))) and set(held.values()) == {1}
            assert len({(one.row_tile, one.k_block) for one in images}) == len(images)
            assert max(one.row_tile * ceil(k / 64) + one.k_block for one in images) < schedule.flags(size)
            for one in images:
                if order != TOGETHER:
                    assert one.first == 0 and one.run_row + one.rows <= (size.rows if order == COLUMNS else rows)
                    continue
                assert one.row + source * size.shard_rows == one.run_row == one.row_tile * 128


def rows_of(image: Image) -> range:
    """Of the box, those that are the shard's."""
    return range(image.first, image.first + image.rows)


def test_images_of_a_band_come_k_block_by_k_block() -> None:
    size, schedule = GatherSize(segment_rows=640, k=128, n=(8,), world=2), GatherSchedule(grid=4, band=3)
    images = [(one.row_tile, one.k_block) for one in images_of(size, schedule, 0)]
    assert images == [*product(range(3), [0]), *product(range(3), [1]), *product((3, 4), [0]), *product((3, 4), [1])]


@in_every_order
def test_a_tile_reads_the_images_that_hold_its_rows(order: int) -> None:
    for rows in (1, 100, 300):
        size, schedule = size_of(order, 3, rows), GatherSchedule(grid=1, order=order)
        sent = {source: images_of(size, schedule, source) for source in range(3)}
        for place in tiles_of(size, schedule, 0, 0):
            sources = [place.owner] if order == APART else range(3)
            held = [one for source in sources for one in sent[source] if one.row_tile == place.row_tile]
            first = {one.k_block: 0 for one in held}
            for one in held:
                first[one.k_block] += one.rows
            expected = (place.last_row - place.row + 1) * (3 if order == COLUMNS else 1)
            assert set(first) == set(range(3)) and set(first.values()) == {expected}
            assert order != APART or all(one.row == place.row for one in held)


@pytest.mark.parametrize("rows", [1, 127, 300])
def test_rows_that_lie_together_are_returned_once(rows: int) -> None:
    size, schedule = size_of(TOGETHER, 4, rows), GatherSchedule(grid=3, order=TOGETHER)
    images = images_of(size, schedule, 1, first_step=1, whole=True)
    held = Counter((one.run_row + row, one.k_block) for one in images for row in rows_of(one))
    assert set(held) == set(product(range(size.rows), range(3))) and set(held.values()) == {1}


Flag = tuple[int, int, int, int]  # at rank, from rank, row tile, k-block
Steps = list[tuple[list[Flag], list[Flag]]]  # what is waited for, what is raised


def carried(size: GatherSize, schedule: GatherSchedule, rank: int, block: int, beside: bool) -> Steps:
    """What the carrying thread of a block does where the gathered tensor is returned. Images of the others are taken
    when they come, and those of rows that lie together (but for `beside`) when all own ones are sent.
    """
    world, together = size.world, schedule.order == TOGETHER
    first_step = 0 if together else 1
    sent = images_of(size, schedule, rank, first_step=first_step, steps=world - first_step)
    come = images_of(size, schedule, rank, first_step=1, whole=True) if together else sent
    steps: Steps = []
    received = block
    for at in range(block, max(len(sent) + schedule.grid * len(come), 1), schedule.grid):
        if at < len(sent):
            one = sent[at]
            steps.append(([], [((rank - one.step) % world, rank, one.row_tile, one.k_block)]))
        if received < len(come) and (at >= len(sent) or (received < at and (beside or not together))):
            one = come[received]
            sources = (rank + one.step) % world, (rank + one.step) % world
            if together:
                sources = one.run_row // size.shard_rows, (one.run_row + one.rows - 1) // size.shard_rows
            needs = [(rank, source, one.row_tile, one.k_block) for source in range(sources[0], sources[1] + 1)]
            steps.append((needs, []))
            received += schedule.grid
    return steps


def computed(size: GatherSize, schedule: GatherSchedule, place: Place, rank: int) -> list[Flag]:
    """What a tile waits for."""
    if schedule.order == TOGETHER:
        first, last = (row // size.shard_rows for row in (place.row, place.last_row))
        sources = list(range(first, last + 1))
    else:
        sources = [place.owner] if schedule.order == APART else list(range(size.world))
        sources = [source for source in sources if source != rank]
    return [(rank, source, place.row_tile, k) for source in sources for k in range(ceil(size.k / 64))]


def stuck_threads(
    size: GatherSize, plan: GatherSchedule, grids: Sequence[int], *, one_thread: bool = False, beside: bool = False
) -> int:
    """Threads that can never finish: those that carry and those that load are different ones. Every wait is for a flag
    that stays raised, so that running whoever can until nobody can decides it.
    """
    threads: list[Steps] = []
    for rank, grid in enumerate(grids):
        schedule = GatherSchedule(grid=grid, band=plan.band, order=plan.order)
        for block in range(grid):
            tiles: Steps = [
                (computed(size, schedule, place, rank), []) for place in tiles_of(size, schedule, rank, block)
            ]
            moves = carried(size, schedule, rank, block, beside)
            threads += [tiles + moves] if one_thread else [tiles, moves]
    return left_waiting(threads)


def left_waiting(threads: Sequence[Steps]) -> int:
    """Threads that can never finish."""
    raised: set[Flag] = set()
    done = [0] * len(threads)
    moved = True
    while moved:
        moved = False
        for i, steps in enumerate(threads):
            while done[i] < len(steps) and all(flag in raised for flag in steps[done[i]][0]):
                raised.update(steps[done[i]][1])
                done[i] += 1
                moved = True
    return sum(done[i] < len(steps) for i, steps in enumerate(threads))


@in_every_order
@pytest.mark.parametrize("world", [2, 3, 4])
def test_nothing_gets_stuck(order: int, world: int) -> None:
    for rows, band in product((100, 600), (1, 8)):
        size, schedule = size_of(order, world, rows), GatherSchedule(grid=5, band=band, order=order)
        for grids in ((3,) * world, (5,) * world, tuple(3 + rank for rank in range(world))):
            assert stuck_threads(size, schedule, grids) == 0, (rows, band, grids)


def test_blocks_that_compute_before_they_push_get_stuck() -> None:
    size, schedule = size_of(APART, 2), GatherSchedule(grid=3)
    assert stuck_threads(size, schedule, (3, 3)) == 0
    assert stuck_threads(size, schedule, (3, 3), one_thread=True) > 0


def test_rows_that_lie_together_and_are_taken_before_all_are_sent_get_stuck() -> None:
    size, schedule = size_of(TOGETHER, 2, 300), GatherSchedule(grid=2, order=TOGETHER)
    assert stuck_threads(size, schedule, (2, 2)) == 0
    assert stuck_threads(size, schedule, (2, 2), beside=True) > 0


def fetched(size: GatherSize, schedule: GatherSchedule, rank: int, block: int, slots: int, first: bool) -> Steps:
    """What the thread of a block that fetches does: own images are laid ready (`first`: before any is fetched), then as
    many of the others' fetched. What it tells its own GPU is a flag of the images' own source.
    """
    own = images_of(size, schedule, rank, first_step=0)
    come = images_of(size, schedule, rank, first_step=1, steps=size.world - 1)
    stride, steps = slots * schedule.grid, []
    for at in range(block, len(come), stride):
        batch = range(at, at + stride, schedule.grid)
        ready = [own[i] for i in batch if i < len(own)]
        laid = [(to, -1 - rank, one.row_tile, one.k_block) for one in ready for to in range(size.world)]
        wanted = [(come[i], (rank + come[i].step) % size.world) for i in batch if i < len(come)]
        needs = [(rank, -1 - source, one.row_tile, one.k_block) for one, source in wanted]
        raised = [(rank, source, one.row_tile, one.k_block) for one, source in wanted]
        steps += [([], laid), (needs, raised)] if first else [(needs, raised), ([], laid)]
    return steps


def stuck_fetching(size: GatherSize, plan: GatherSchedule, grids: Sequence[int], slots: int, first: bool = True) -> int:
    """As `stuck_threads`."""
    threads: list[Steps] = []
    for rank, grid in enumerate(grids):
        schedule = GatherSchedule(grid=grid, band=plan.band, order=plan.order)
        for block in range(grid):
            places = tiles_of(size, schedule, rank, block)
            threads.append([(computed(size, schedule, place, rank), []) for place in places])
            threads.append(fetched(size, schedule, rank, block, slots, first))
    return left_waiting(threads)


@pytest.mark.parametrize("order", [APART, COLUMNS], ids=["apart", "columns"])
@pytest.mark.parametrize("world", [2, 3])
def test_nothing_gets_stuck_where_blocks_fetch(order: int, world: int) -> None:
    size, schedule = size_of(order, world, 600), GatherSchedule(grid=5, order=order)
    for grids in ((3,) * world, (5,) * world, tuple(3 + rank for rank in range(world))):
        for slots in (1, 2, 4):
            assert stuck_fetching(size, schedule, grids, slots) == 0, (grids, slots)
    assert stuck_fetching(size, schedule, (3,) * world, 2, first=False) > 0


@in_every_order
@pytest.mark.parametrize("k", [512, 576])
def test_blocks_that_share_a_tile_get_their_first_images_first(order: int, k: int) -> None:
    size, schedule = size_of(order, 2, 600, k=k), GatherSchedule(grid=5, band=8, order=order)
    images = images_of(size, schedule, 1, split=2)
    assert {(one.row_tile, one.k_block) for one in images} == {
        (one.row_tile, one.k_block) for one in images_of(size, schedule, 1)
    }
    assert len(images) == len(set(images))
    turns = list(dict.fromkeys(one.k_block for one in images))
    assert turns == ([0, 4, 1, 5, 2, 6, 3, 7] if k == 512 else list(range(9)))


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_runs_of_images_are_sent_once_each_and_by_turns(length: int) -> None:
    for grid, end in ((1, 7), (5, 64), (8, 64), (13, 3)):
        sent = [sent_by(block, grid, length, end) for block in range(grid)]
        assert sorted(number for one in sent for number in one) == list(range(end)), (grid, end)
        for block, numbers in enumerate(sent):
            assert numbers == [at for at in range(end) if at // length % grid == block]
