"""Reductions over nodes, in the order of the device's own header: every tile once, and nobody waits for ever."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from itertools import product
from pathlib import Path

import pytest

from tests.runtime.device_header import built

SOURCE = Path(__file__).with_name("network_order.cc")
RIGHT, STUCK = 0, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A launch, as in network_order.cc: sizes in tiles, `slots` of the staging rings, `world` ranks of a node."""

    scatters: bool
    nodes: int
    world: int
    rows: int
    columns: int
    lag: int
    slots: int
    net_lag: int
    net_slots: int
    chunk_tiles: int
    grid: int
    sends_credits: bool = True


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return built(SOURCE.read_text())


def walk(library: ctypes.CDLL, case: Case) -> int:
    words = [int(value) for value in astuple(case)]
    result: int = library.walk((ctypes.c_uint32 * len(words))(*words))
    return result


def cases(scatters: bool) -> Iterator[Case]:
    """Whole rings and rings of two and three chunks; the host's rules for lags (see docs/memory_ordering.md)."""
    shapes = product((2, 3, 4), (1, 2, 4), (1, 4), (1, 3), (1, 2, 4), (0, 2, 3), (1, 5, 1000), (1, 5))
    for nodes, world, rows, columns, chunk, ring, lag, grid in shapes:
        ranks, tiles = nodes * world, rows * columns
        per_owner = tiles if scatters else -(-tiles // ranks)
        chunk_tiles = min(chunk, per_owner)
        whole = -(-per_owner // chunk_tiles) * chunk_tiles
        net_slots = ring * chunk_tiles or whole
        if ranks > 8 or (ring and net_slots >= whole):
            continue
        handled = per_owner * nodes
        slots = 3 if ring and handled > 3 else handled
        yield Case(
            scatters=scatters, nodes=nodes, world=world, rows=rows, columns=columns, chunk_tiles=chunk_tiles, grid=grid,
            net_slots=net_slots, net_lag=net_slots - chunk_tiles if ring else per_owner,
            slots=slots, lag=min(lag, slots - 1) if slots < handled else lag,
        )  # fmt: skip


@pytest.mark.parametrize("scatters", [True, False], ids=["reduce_scatter", "all_reduce"])
def test_every_tile_comes_once_and_every_thread_ends(library: ctypes.CDLL, scatters: bool) -> None:
    tried = list(cases(scatters))
    assert len(tried) >= 500
    assert not [case for case in tried if walk(library, case) != RIGHT]


@pytest.mark.parametrize(
    ("net_lag", "net_slots", "sends_credits"),
    [(1, 12, True), (8, 8, True), (4, 8, False)],
    ids=["shorter_than_a_chunk", "longer_than_the_ring", "no_credit"],
)
def test_a_wrong_lag_or_a_missing_credit_is_found(
    library: ctypes.CDLL, net_lag: int, net_slots: int, sends_credits: bool
) -> None:
    case = Case(
        scatters=True, nodes=2, world=1, rows=4, columns=3, lag=1, slots=24, chunk_tiles=4, grid=1,
        net_lag=net_lag, net_slots=net_slots, sends_credits=sends_credits,
    )  # fmt: skip
    assert walk(library, case) == STUCK
