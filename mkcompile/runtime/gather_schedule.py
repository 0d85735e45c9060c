"""Defaults for what an all-gather launch may choose: variant, tile, grid, chunks. A planner may differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from mkcompile.plan.arrivals import EngineWork
from mkcompile.runtime.gather_abi import APART, BLOCKS_PULL, COLUMNS, ENGINE_COPIES, PEERS_READ, TOGETHER
from mkcompile.runtime.gather_launch import GatherSchedule, GatherSize
from mkcompile.runtime.kernel_config import BLOCK_K, GATHER_TILES, SHARED_GATHER_TILES, KernelConfig
from mkcompile.runtime.stream_schedule import StreamForm, most_clusters, stream_config
from mkcompile.runtime.tile_schedule import SM_FLOP_PER_US, TILE_START_US, LaunchSize

Variant = Literal["push", "remote_read", "copy_engine", "library", "network", "stream", "pull"]
#: What all blocks together move to the peers, and what they read there, bytes a microsecond; and what products lose
#: meanwhile. Source: docs/decisions/307-all-gather.md.
_PUSH_BYTES_PER_US, _READ_BYTES_PER_US, _PULL_BYTES_PER_US = 182e3, 326e3, 300e3
_BESIDE_MOVING, _PULL_FIRST_US = 0.25, 15.0
#: A push whose blocks have room for one image is so much faster, that of several weights slower. Source: the sweep.
_ONE_IMAGE, _SEVERAL_WEIGHTS = 1.08, 1.2
#: Copy engine: rate, start, and what each chunk and its flag cost.
_ENGINE_BYTES_PER_US, _ENGINE_START_US, _ENGINE_CHUNK_US = 366e3, 4.0, 6.0
_ENGINE_CHUNK_BYTES, _MAX_CHUNKS = 16 << 20, 8
#: Tiles' times beside a gather over those of `LaunchSize`; 64 rows read operands that others read, too.
_TILE_FACTORS = {(128, 128): 1.04, (128, 160): 0.94, (128, 192): 1.0, (128, 224): 1.0, (128, 256): 0.97}
_HALF_TILE_FACTOR, _HALF_TILE_TOGETHER = 1.25, 1.06
#: Host time of a call by the library: its products are calls of torch. Inside a CUDA graph there is none.
_LIBRARY_HOST_US, _PRODUCT_HOST_US = 50.0, 60.0
#: From the last image to the last product: a time and a share of a tile; a launch of the copy engine's gate.
_ARRIVAL_US, _ARRIVAL_TILES, _GATE_US = 5.0, 0.15, 3.0
_MEMORY_BYTES_PER_US = 4.3e6
#: A push whose images of 128 rows have so many nanoseconds each, as many as go by undelayed; from its start to the
#: peers' first products, and from the last image to the last product. Source: docs/decisions/307-all-gather.md.
_PACE_NS = 60
#: Where two blocks share several tiles, two images behind one fence go a little faster.
_SHARED_PACE_NS, _SHARED_FENCED = 50, 2
_PACED_FIRST_US, _PACED_ARRIVAL_US, _BESIDE_PACED = 8.0, 13.0, 0.15
#: What pushes of few rows take longer than these, in which no tile begins with own rows.
_TOGETHER_US = 6.0
#: What two blocks that share a tile lose to the exchange of their sums.
_SHARED_US = 2.5
#: Blocks up to which pairs of SMs fill an H200; with more left to others each of its GPCs may have one that is alone.
_PAIRED_BLOCKS, _GPCS = 128, 8
#: A library's rate over that of our largest tile.
_LIBRARY_GAIN = 1.035
# A library takes all SMs, also those that a launch of ours leaves to others; as many as it leaves, at least.
_LIBRARY_BLOCKS = 128
_GROUP_ROWS = 128
#: Up to so many gathered rows the weights are what is read: they must be read once.
_TOGETHER_ROWS = 512
_RASTER_GROUP = 8
#: Streaming kernels: bytes of a part of a shard, which a block copies, and parts, each of which all blocks look for;
#: what goes before the products; and one k-block of a tile.
_PART_BYTES, _MAX_PARTS = 32 << 10, 64
_STREAM_START_US, _STREAM_COPY_BYTES_PER_US, _SM_LOAD_BYTES_PER_US, _STREAM_BLOCK_US = 8.5, 380e3, 95e3, 0.27
#: A k-block of the smallest tile beside a gather. Source: benchmarks/results/2xh200/gather_small.jsonl, up to 64 rows.
_BLOCK_US = 0.4
#: Their tiles, and the blocks that share one.
STREAM_GATHERS = (
    StreamForm((64, 32), 1), StreamForm((64, 32), 2), StreamForm((64, 64), 1), StreamForm((64, 64), 2),
    StreamForm((64, 64), 4), StreamForm((64, 128), 1), StreamForm((64, 128), 2), StreamForm((64, 128), 4),
    StreamForm((128, 64), 1), StreamForm((128, 64), 2), StreamForm((128, 64), 4), StreamForm((128, 128), 1),
    StreamForm((128, 128), 2),
)  # fmt: skip


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
    factor = _TILE_FACTORS.get((config.block_m, config.block_n), _HALF_TILE_FACTOR if apart else _HALF_TILE_TOGETHER)
    return max(one.tile_us(config) * factor, ceil(size.inner / BLOCK_K) * _BLOCK_US) + TILE_START_US


def _band(config: KernelConfig, size: GatherSize, grid: int) -> int:
    """Row tiles of one wave of tiles: their images are sent together."""
    rows = ceil(grid / size.tiles_n(config))
    return ceil(rows / _RASTER_GROUP) * _RASTER_GROUP


def _moved_choice(
    config: KernelConfig, size: GatherSize, max_grid: int, schedule: GatherSchedule, moving_us: float
) -> tuple[GatherSchedule, float]:
    """The smallest grid of as many waves, and the time of products beside blocks that move rows."""
    positions = schedule.positions(config, size)
    waves = ceil(positions / max_grid)
    tile_us = _tile_us(config, size)
    busy_us = waves * tile_us
    busy_us += _BESIDE_MOVING * min(busy_us, moving_us)
    grid = ceil(positions / waves)
    us = max(busy_us, moving_us + _ARRIVAL_US + _ARRIVAL_TILES * tile_us)
    return replace(schedule, grid=grid, band=_band(config, size, grid)), us


def push_choice(config: KernelConfig, size: GatherSize, max_grid: int, returned: bool) -> GatherChoice:
    """All blocks push beside their products; with `config.split` two share each tile."""
    config = replace(config, returns=returned)
    order = gather_order(size)
    if config.split > 1 or (order != TOGETHER and not returned):
        return _paced_choice(config, size, max_grid)
    destinations = size.world if order == TOGETHER else size.world - 1
    moving_us = size.shard_bytes * destinations / _PUSH_BYTES_PER_US * (1.2 if returned else 1.0)
    moving_us *= (1.0 if config.image_slots > 1 else 1 / _ONE_IMAGE) * (1.0 if len(size.n) == 1 else _SEVERAL_WEIGHTS)
    schedule = GatherSchedule(grid=max_grid, order=order, image_rows=config.block_m)
    schedule, us = _moved_choice(config, size, max_grid, schedule, moving_us)
    if order == TOGETHER or moving_us > us / 2:  # more blocks move more
        schedule = replace(schedule, grid=max_grid)
    us += _TOGETHER_US if order == TOGETHER else 0.0
    return GatherChoice(variant="push", config=config, schedule=schedule, us=us)


def _paced_choice(config: KernelConfig, size: GatherSize, max_grid: int) -> GatherChoice:
    """Images have a time each; what is shared by two blocks is half as long."""
    schedule = GatherSchedule(
        grid=resident_grid(config, max_grid), order=COLUMNS if size.columns else APART, image_rows=config.block_m,
        pace_ns=_PACE_NS * config.block_m // 128,
    )  # fmt: skip
    images = schedule.images(size) * (size.world - 1)
    moving_us = images * schedule.pace_ns / 1e3
    at_once = schedule.grid // config.split
    waves = ceil(schedule.positions(config, size) / at_once)
    tile_us = _tile_us(config, size) / config.split + (_SHARED_US if config.split > 1 else 0.0)
    busy_us = waves * tile_us + (_PACED_FIRST_US if waves == 1 else 0.0)
    busy_us += _BESIDE_PACED * min(busy_us, moving_us)
    us = max(busy_us, moving_us + _PACED_ARRIVAL_US + _ARRIVAL_TILES * tile_us)
    # As many blocks as even waves need, or as there are images to send: others have nothing to do.
    needed = max(ceil(schedule.positions(config, size) / waves), ceil(images / config.split))
    schedule = replace(schedule, band=_band(config, size, at_once), grid=min(needed, at_once) * config.split)
    if config.split > 1 and waves > 1:
        schedule = replace(schedule, pace_ns=_SHARED_PACE_NS, fenced=_SHARED_FENCED)
    return GatherChoice(variant="push", config=config, schedule=schedule, us=us)


def shared_choice(config: KernelConfig, size: GatherSize, max_grid: int) -> GatherChoice:
    """A push whose tiles are shared by two blocks each. For `SHARED_GATHER_TILES`."""
    return push_choice(replace(config, split=2, stages=0), size, max_grid, returned=False)


def can_share(size: GatherSize, returned: bool) -> bool:
    """Do two blocks have k-blocks to share, and nothing to return, with which it was never timed?"""
    return not returned and size.k >= 2 * BLOCK_K


def resident_grid(config: KernelConfig, max_grid: int) -> int:
    """Blocks that are resident at once, whichever SMs the others have."""
    if config.split == 1 or config.streams:
        return max_grid
    paired = max_grid if max_grid >= _PAIRED_BLOCKS else max(2, max_grid - _GPCS)
    return paired // config.split * config.split


def pull_choice(config: KernelConfig, size: GatherSize, max_grid: int) -> GatherChoice:
    """All blocks fetch the peers' rows beside their products."""
    config, order = replace(config, pulls=True), COLUMNS if size.columns else APART
    moving_us = size.shard_bytes * (size.world - 1) / _PULL_BYTES_PER_US
    schedule = GatherSchedule(grid=max_grid, mover=BLOCKS_PULL, order=order, image_rows=config.block_m)
    schedule, us = _moved_choice(config, size, max_grid, schedule, moving_us)
    if schedule.positions(config, size) < max_grid * size.world:  # some begin with the peers' rows
        us += _PULL_FIRST_US
    if moving_us > us / 2:  # more blocks move more
        schedule = replace(schedule, grid=max_grid)
    return GatherChoice(variant="pull", config=config, schedule=schedule, us=us)


def can_stream_gather(size: GatherSize, form: StreamForm, returned: bool) -> bool:
    """Few rows that stay where they are."""
    return not returned and gather_order(size) == TOGETHER and size.k >= BLOCK_K * form.split


def stream_choice(base: KernelConfig, size: GatherSize, max_grid: int, form: StreamForm) -> GatherChoice:
    """All blocks copy the shard to all ranks, then clusters share the k of a tile. See `can_stream_gather`."""
    config = stream_config(base, form.tile, form.split)
    tiles = ceil(size.rows / config.block_m) * size.tiles_n(config)
    waves = ceil(tiles / most_clusters(config, max_grid))
    grid = ceil(tiles / waves) * form.split
    schedule = GatherSchedule(
        grid=grid, order=TOGETHER, image_rows=config.block_m,
        parts=min(ceil(size.shard_bytes / _PART_BYTES), _MAX_PARTS, grid),
    )  # fmt: skip
    rows = min(config.block_m, ceil(size.rows / 8) * 8)
    block_us = max(_STREAM_BLOCK_US, (rows + config.block_n) * BLOCK_K * 2 / _SM_LOAD_BYTES_PER_US)
    streamed_us = max(
        waves * ceil(size.k / BLOCK_K / form.split) * block_us, sum(size.n) * size.k * 2 / _MEMORY_BYTES_PER_US
    )
    us = _STREAM_START_US + size.shard_bytes * (size.world - 1) / _STREAM_COPY_BYTES_PER_US + streamed_us
    return GatherChoice(variant="stream", config=config, schedule=schedule, us=us)


def stream_choices(base: KernelConfig, size: GatherSize, max_grid: int, returned: bool) -> Iterator[GatherChoice]:
    """All of them that can be."""
    for form in STREAM_GATHERS:
        if can_stream_gather(size, form, returned):
            yield stream_choice(base, size, max_grid, form)


def read_choice(config: KernelConfig, size: GatherSize, max_grid: int) -> GatherChoice:
    """Blocks copy the shard to where peers reach it, and load the peers' rows there: once for every column tile."""
    order = COLUMNS if size.columns else APART
    loaded = size.shard_bytes * (size.world - 1) * size.tiles_n(config)
    schedule = GatherSchedule(grid=max_grid, mover=PEERS_READ, order=order, image_rows=config.block_m)
    schedule, us = _moved_choice(config, size, max_grid, schedule, loaded / _READ_BYTES_PER_US)
    return GatherChoice(variant="remote_read", config=config, schedule=replace(schedule, grid=max_grid), us=us)


def engine_choice(config: KernelConfig, size: GatherSize, max_grid: int) -> GatherChoice:
    """The copy engine pushes, in as many chunks as end soonest. Blocks return the gathered tensor."""
    most = max(1, min(_MAX_CHUNKS, size.shard_bytes // _ENGINE_CHUNK_BYTES, size.shard_rows // _GROUP_ROWS))
    schedule = GatherSchedule(
        grid=max_grid, mover=ENGINE_COPIES, order=COLUMNS if size.columns else APART, image_rows=config.block_m
    )
    positions = schedule.positions(config, size)
    grid = ceil(positions / ceil(positions / max_grid))
    work = EngineWork(
        positions=positions, own=0 if size.columns else positions // size.world, grid=grid,
        tile_us=_tile_us(config, size), sent_us=size.shard_bytes * (size.world - 1) / _ENGINE_BYTES_PER_US,
        start_us=_ENGINE_START_US, chunk_us=_ENGINE_CHUNK_US * (size.world - 1),
    )  # fmt: skip
    us, chunks, slices = work.best(most)
    group_rows = ceil(ceil(size.shard_rows / chunks) / _GROUP_ROWS) * _GROUP_ROWS
    schedule = replace(schedule, grid=grid, group_rows=group_rows, slices=slices if size.k > BLOCK_K else 1)
    return GatherChoice(variant="copy_engine", config=config, schedule=schedule, us=us + _GATE_US)


def library_choice(
    config: KernelConfig, size: GatherSize, chunks: int = 1, max_grid: int = _LIBRARY_BLOCKS
) -> GatherChoice:
    """The copy engine pushes, and the library multiplies: own rows, then each chunk that has come. Rows only."""
    group_rows = ceil(ceil(size.shard_rows / chunks) / _GROUP_ROWS) * _GROUP_ROWS
    chunks = ceil(size.shard_rows / group_rows)
    schedule = GatherSchedule(grid=1, mover=ENGINE_COPIES, group_rows=group_rows)
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
        config = replace(base.with_tile(*tile), returns=returned)
        yield push_choice(config, size, max_grid, returned)
        if tile in SHARED_GATHER_TILES and can_share(size, returned):
            yield shared_choice(config, size, max_grid)
        yield engine_choice(config, size, max_grid)
        if not returned:
            yield pull_choice(config, size, max_grid)
        if not returned and size.tiles_n(config) == len(size.n):
            yield read_choice(config, size, max_grid)
    yield from stream_choices(base, size, max_grid, returned)
    if not returned and not size.columns and size.segments == 1:
        yield library_choice(base, size, max_grid=max_grid)


def choose_gather(
    base: KernelConfig, size: GatherSize, max_grid: int, returned: bool = False, variant: Variant | None = None
) -> GatherChoice:
    """The fastest by the model, of equal ones the smallest tile; with `variant`, of that variant, of which there must
    be one.
    """
    best = fastest_gather(base, size, max_grid, returned, variant)
    assert best is not None, (variant, size)
    return best


def fastest_gather(
    base: KernelConfig, size: GatherSize, max_grid: int, returned: bool, variant: Variant | None
) -> GatherChoice | None:
    """As `choose_gather`; None where no tile is offered: reads of weights that are more than a tile wide."""
    offered = (one for one in choices(base, size, max_grid, returned) if variant is None or one.variant == variant)
    return min(offered, key=lambda one: (one.us, one.config.block_m * one.config.block_n), default=None)
