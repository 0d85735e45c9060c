"""The order of tiles: every tile once, shared out evenly, and no state from which the ranks can't go on."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from .device_schedule import Task, walk
from .progress_model import Rules, stuck_threads


def orders_of(
    scatters: bool, world: int, rows: int, columns: int, lag: int, grids: tuple[int, ...]
) -> list[list[Task]]:
    """One order a rank, `rows` x `columns` tiles for each owner (scattered) or in all."""
    return [
        walk(
            scatters=scatters,
            world=world,
            rank=rank,
            segment_rows=rows * 128,
            n=columns * 128,
            lag=lag,
            grid=grids[rank],
        )
        for rank in range(world)
    ]


def grid_choices(world: int) -> list[tuple[int, ...]]:
    """Equal grids and grids that differ by rank."""
    return [
        (1,) * world,
        (4,) * world,
        (5,) * world,
        tuple(1 + rank for rank in range(world)),
        tuple(7 - rank for rank in range(world)),
    ]


@pytest.mark.parametrize("scatters", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_every_rank_computes_every_tile_once(scatters: bool, world: int) -> None:
    for rows, columns, lag, grid in product((1, 3, 6), (1, 5), (1, 4, 100), (1, 4, 6)):
        for rank in range(world):
            segment_rows = rows * 128 - 5
            order = walk(
                scatters=scatters, world=world, rank=rank, segment_rows=segment_rows, n=columns * 128, lag=lag,
                grid=grid, segments=2 if scatters else 1,
            )  # fmt: skip
            tiles = Counter((task.owner, task.index) for task in order if task.valid)
            places = Counter((task.row, task.column) for task in order if task.valid)
            expected = rows * columns * (2 * world if scatters else 1)
            assert len(tiles) == len(places) == expected and set(tiles.values()) == set(places.values()) == {1}


def test_owners_hold_equal_shares_of_an_all_reduce() -> None:
    for world, rows, columns in product((2, 3, 4, 8), (1, 5, 7), (1, 3, 8)):
        order = walk(scatters=False, world=world, rank=0, segment_rows=rows * 128, n=columns * 128, lag=3, grid=4)
        shares = Counter(task.owner for task in order if task.valid)
        assert max(shares.values()) - min(shares.get(rank, 0) for rank in range(world)) <= 1


def test_ranks_agree_on_owners() -> None:
    for scatters, world in product((True, False), (2, 3, 4)):
        orders = orders_of(scatters, world, 3, 5, 4, (4,) * world)
        maps = [{(task.row, task.column): (task.owner, task.index) for task in order if task.valid} for order in orders]
        assert all(other == maps[0] for other in maps)


def test_blocks_get_as_many_own_tiles_as_the_others() -> None:
    grid, world = 8, 2
    order = walk(scatters=True, world=world, rank=0, segment_rows=16 * 128, n=8 * 128, lag=16, grid=grid)
    own = [sum(task.owner == 0 for task in order[block::grid]) for block in range(grid)]
    assert len(set(own)) == 1
    assert all(task.owner == 0 for task in order[-grid:]), "a peer's tile in the last wave"


@pytest.mark.parametrize("world", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce_direct", "all_reduce_staged"])
def test_nothing_gets_stuck(world: int, kind: str) -> None:
    scatters = kind == "reduce_scatter"
    walked = 0
    for rows, columns, lag, slots in product((1, 4), (1, 3), (1, 2, 5, 50), (2, 3, 6, 1000)):
        effective_lag = min(lag, slots - 1) if slots < rows * columns else lag
        for grids in grid_choices(world):
            orders = orders_of(scatters, world, rows, columns, effective_lag, grids)
            rules = Rules(slots=slots, broadcasts=not scatters, staged=kind == "all_reduce_staged")
            assert stuck_threads(orders, grids, rules) == 0, (rows, columns, lag, slots, grids)
            walked += 1
    assert walked == 320


def test_planted_errors_get_stuck() -> None:
    world, grids = 2, (1, 1)
    good = orders_of(True, world, 4, 3, 3, grids)
    assert stuck_threads(good, grids, Rules(slots=5)) == 0
    assert stuck_threads(good, grids, Rules(slots=2)) > 0, "a ring shorter than the lag"
    assert stuck_threads(good, grids, Rules(slots=5, frees_partials=False)) > 0, "slots that are never given back"
    assert stuck_threads(good, grids, Rules(slots=5, descending=True)) > 0, (
        "blocks that take positions in falling order"
    )
    own_first = [sorted(order, key=lambda task, rank=rank: task.owner != rank) for rank, order in enumerate(good)]
    assert stuck_threads(own_first, grids, Rules(slots=1000)) > 0, "own tiles before the peers'"
