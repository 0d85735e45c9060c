"""Waves of tiles beside a copy engine: what chunks bring forward, and what they cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mkcompile.plan.arrivals import EngineWork

WORK = EngineWork(positions=512, own=256, grid=128, tile_us=60.0, sent_us=180.0, start_us=8.0, chunk_us=5.0)


def test_rows_that_come_beside_own_products_cost_nothing() -> None:
    early = replace(WORK, sent_us=40.0)
    assert [early.us(chunks) for chunks in (1, 2, 4)] == [4 * early.tile_us] * 3


def test_a_wave_begins_when_the_last_rows_that_it_reads_are_here() -> None:
    assert WORK.us(1) == pytest.approx(8 + 180 + 5 + 2 * 60)
    assert WORK.us(2) == pytest.approx(8 + 180 + 2 * 5 + 60)
    assert WORK.us(4) == pytest.approx(8 + 180 + 4 * 5 + 60)  # the last wave waits for all of them
    assert WORK.us(3) == pytest.approx(8 + 180 + 3 * 5 + 60)


def test_where_shards_are_columns_every_wave_waits_for_rows() -> None:
    columns = replace(WORK, own=0)
    assert columns.us(1) == pytest.approx(8 + 180 + 5 + 4 * 60)
    assert columns.us(4) < columns.us(1)


def test_chunks_as_measured() -> None:
    """8192x1280x8192, tiles of 128x160, one chunk and four: 316 and 270 us (gather_sweep.jsonl, commit 152bf66)."""
    measured = EngineWork(positions=512, own=256, grid=128, tile_us=62.0, sent_us=183.0, start_us=8.0, chunk_us=6.0)
    assert measured.us(1) == pytest.approx(316, rel=0.03) and measured.us(4) == pytest.approx(270, rel=0.03)
