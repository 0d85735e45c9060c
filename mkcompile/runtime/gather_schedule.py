"""Defaults for what an all-gather launch may choose: variant, tile, grid, push blocks, chunks. A planner may differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Literal

from mkcompile.runtime.gather_abi import APART, COLUMNS, TOGETHER
from mkcompile.runtime.gather_launch import GatherSchedule, GatherSize
from mkcompile.runtime.kernel_config import GATHER_TILES, KernelConfig
from mkcompile.runtime.tile_schedule import SM_FLOP_PER_US, TILE_START_US, LaunchSize

Variant = Literal["push", "copy_engine", "library"]
#: What one block moves to a peer, and all of them, bytes a microsecond. Source: docs/decisions/307-all-gather.md.
PUSH_BLOCK_BYTES_PER_US, PUSH_BYTES_PER_US = 22e3, 263e3
#: Copy engine: rate, start, and what each chunk and its flag cost.
_ENGINE_BYTES_PER_US, _ENGINE_START_US, _ENGINE_CHUNK_US = 366e3, 8.0, 6.0
_ENGINE_CHUNK_BYTES, _MAX_CHUNKS = 16 << 20, 8
#: Tiles' times beside a gather over those of `LaunchSize`; 64 rows read operands that others read, too.
_TILE_FACTORS = {(128, 128): 1.02, (128, 160): 0.94, (128, 192): 0.94, (128, 224): 1.0, (128, 256): 0.97}
_HALF_TILE_FACTOR = 1.25
#: Host time of a call by the library: its products are calls of torch. Inside a CUDA graph there is none.
_LIBRARY_HOST_US, _PRODUCT_HOST_US = 50.0, 60.0
#: From the last flag to the first product, and a launch of the gate in front.
_ARRIVAL_US, _GATE_US = 3.0, 3.0
PUSH_BLOCKS = (4, 8, 16)
_MEMORY_BYTES_PER_US = 4.3e6
#: A library's rate over that of our largest tile.
_LIBRARY_GAIN = 1.035
# A library takes all SMs, also those that a launch of ours leaves to others; as many as it leaves, at least.
_LIBRARY_BLOCKS = 128
_COPY_BLOCKS = 4
_PUSH_GROUP_ROWS = 128
#: Up to so many gathered rows the weights are what is read: they must be read once.
_TOGETHER_ROWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherChoice:
    """How one call is carried out, and its predicted time. Units: `us` microseconds."""

    variant: Variant
    config: KernelConfig
    schedule: GatherSchedule
    us: float


def gather_order(size: GatherSize) -> int:
    """How the rows of a push lie."""
    if size.columns:
        return COLUMNS
    return TOGETHER if size.segments == 1 and size.rows <= _TOGETHER_ROWS else APART


def _tile_us(config: KernelConfig, size: GatherSize) -> float:
    one = LaunchSize(m=size.rows, n=sum(size.n), k=size.inner, world=size.world)
    apart = gather_order(size) != TOGETHER
    factor = _TILE_FACTORS.get((config.block_m, config.block_n), _HALF_TILE_FACTOR if apart else 1.0)
    return one.tile_us(config) * factor + TILE_START_US


def push_choice(config: KernelConfig, size: GatherSize, max_grid: int, blocks: int, returned: bool) -> GatherChoice:
    """Blocks push, and compute as soon as they have."""
    order = gather_order(size)
    tile_us = _tile_us(config, size)
    destinations = size.world if order == TOGETHER else size.world - 1
    rate = min(blocks * PUSH_BLOCK_BYTES_PER_US, PUSH_BYTES_PER_US)
    moving_us = _ARRIVAL_US + size.shard_bytes * destinations / rate * (1.2 if returned else 1.0)
    schedule = GatherSchedule(grid=max_grid, blocks=blocks, group_rows=_PUSH_GROUP_ROWS, join=0, order=order)
    positions, computing = schedule.positions(config, size), max_grid - blocks
    waves = ceil(moving_us / tile_us)
    join = min(positions, waves * computing)
    if join < positions:
        waves += ceil((positions - join) / max_grid)
    else:
        waves = ceil(positions / computing)
        computing = ceil(positions / waves)
    us = max(waves * tile_us, moving_us + _ARRIVAL_US + tile_us)
    schedule = GatherSchedule(
        grid=computing + blocks, blocks=blocks, group_rows=_PUSH_GROUP_ROWS, join=join, order=order
    )
    return GatherChoice(variant="push", config=config, schedule=schedule, us=us)


def engine_choice(config: KernelConfig, size: GatherSize, max_grid: int, returned: bool) -> GatherChoice:
    """The copy engine pushes; blocks are only needed to copy the gathered tensor out."""
    chunks = max(1, min(_MAX_CHUNKS, size.shard_bytes // _ENGINE_CHUNK_BYTES, size.shard_rows // _PUSH_GROUP_ROWS))
    group_rows = ceil(ceil(size.shard_rows / chunks) / _PUSH_GROUP_ROWS) * _PUSH_GROUP_ROWS
    blocks = _COPY_BLOCKS if returned else 0
    order = COLUMNS if size.columns else APART
    whole = GatherSchedule(grid=max_grid, blocks=blocks, group_rows=group_rows, join=0, order=order, pushes=False)
    positions = whole.positions(config, size)
    waves = ceil(positions / (max_grid - blocks))
    computing = ceil(positions / waves)
    sent = size.shard_bytes * (size.world - 1)
    engine_us = _ENGINE_START_US + chunks * _ENGINE_CHUNK_US * (size.world - 1) + sent / _ENGINE_BYTES_PER_US
    tile_us = _tile_us(config, size)
    us = _GATE_US + max(waves * tile_us, engine_us + tile_us)
    schedule = GatherSchedule(
        grid=computing + blocks, blocks=blocks, group_rows=group_rows, join=positions, order=order, pushes=False
    )
    return GatherChoice(variant="copy_engine", config=config, schedule=schedule, us=us)


def library_choice(
    config: KernelConfig, size: GatherSize, chunks: int = 1, max_grid: int = _LIBRARY_BLOCKS
) -> GatherChoice:
    """The copy engine pushes, and the library multiplies: own rows, then each chunk that has come. Rows only."""
    group_rows = ceil(ceil(size.shard_rows / chunks) / _PUSH_GROUP_ROWS) * _PUSH_GROUP_ROWS
    chunks = ceil(size.shard_rows / group_rows)
    schedule = GatherSchedule(grid=1, blocks=0, group_rows=group_rows, join=0, pushes=False)
    sent_us = size.shard_bytes * (size.world - 1) / _ENGINE_BYTES_PER_US
    engine_us = _ENGINE_START_US + chunks * _ENGINE_CHUNK_US * (size.world - 1) + sent_us
    pieces = [size.shard_rows] + [group_rows] * chunks * (size.world - 1)
    product_us = [_library_us(rows, size, max_grid) for rows in pieces]
    us = max(sum(product_us), engine_us + product_us[-1]) + _GATE_US * len(pieces)
    us = max(us, _LIBRARY_HOST_US + _PRODUCT_HOST_US * len(pieces) * len(size.n))
    return GatherChoice(variant="library", config=config, schedule=schedule, us=us)


def _library_us(rows: int, size: GatherSize, max_grid: int) -> float:
    """The library's product of so many rows: whole waves of its largest tile, or its weights from memory."""
    tiles = ceil(rows / 128) * sum(ceil(n / 256) for n in size.n)
    waves = ceil(tiles / max(max_grid, _LIBRARY_BLOCKS))
    multiplied_us = waves * 2 * 128 * 256 * size.inner / (_LIBRARY_GAIN * SM_FLOP_PER_US)
    return max(multiplied_us, sum(size.n) * size.inner * 2 / _MEMORY_BYTES_PER_US)


def choices(base: KernelConfig, size: GatherSize, max_grid: int, returned: bool) -> Iterator[GatherChoice]:
    """Every tile and every way, larger tiles first."""
    for tile in reversed(GATHER_TILES):
        config = base.with_tile(*tile)
        for blocks in PUSH_BLOCKS:
            if 2 * blocks <= max_grid:
                yield push_choice(config, size, max_grid, blocks, returned)
        if max_grid > _COPY_BLOCKS:
            yield engine_choice(config, size, max_grid, returned)
    if not returned and not size.columns and size.segments == 1:
        yield library_choice(base, size, max_grid=max_grid)


def choose_gather(
    base: KernelConfig, size: GatherSize, max_grid: int, returned: bool = False, variant: Variant | None = None
) -> GatherChoice:
    """The fastest by the model; with `variant`, of that variant."""
    offered = [one for one in choices(base, size, max_grid, returned) if variant is None or one.variant == variant]
    return min(offered, key=lambda one: one.us)
