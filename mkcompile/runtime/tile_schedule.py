"""Defaults for what a launch may choose: tile, grid, raster, lag and pace. A planner may choose otherwise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from mkcompile.plan.waves import whole_band
from mkcompile.runtime.kernel_config import TILES, KernelConfig

#: Rate of one SM in bursts, FLOP a microsecond. Source: docs/decisions/301-tile-gemm.md.
SM_FLOP_PER_US = 5.9e6
#: Largest push rate with both directions busy, bytes a microsecond. Source: docs/decisions/302-reduce-scatter-order.md.
LINK_BYTES_PER_US = 366e3
#: Rate at which one SM can take in operands, bytes a microsecond, and the cost of beginning a tile.
_SM_LOAD_BYTES_PER_US = 100e3
TILE_START_US = 1.0
_EFFICIENCY = {
    (64, 32): 0.35, (64, 64): 0.55, (64, 128): 0.75, (64, 256): 0.85,
    (128, 64): 0.75, (128, 128): 0.93, (128, 160): 0.95, (128, 192): 0.97, (128, 224): 0.98, (128, 256): 1.0,
}  # fmt: skip
_PACED_SHARE = 0.8
_LINK_BOUND = 1.04
_SHORT_US = 100.0
_LINK_BUSY, _LARGE_TILE = 0.65, 128 * 256
#: Source: docs/decisions/301-tile-gemm.md.
_ALONE_RASTER = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class TileSchedule:
    """What one launch does when.

    Units: `grid` blocks; `raster_group` row tiles; `lag` tiles of each peer before the first own tile; `pace_ns`
    nanoseconds between the panels of a pushed tile; `node_lag` tiles of each other node before the first own one (0:
    all); `chunk_bytes` bytes of a network message.
    """

    grid: int
    raster_group: int = 8
    lag: int = 0
    pace_ns: int = 0
    node_lag: int = 0
    chunk_bytes: int = 256 << 10  # worth its cost. Source: the paper, 3.1

    def __post_init__(self) -> None:
        if self.grid < 1 or self.raster_group < 1 or min(self.lag, self.pace_ns, self.node_lag) < 0:
            raise ValueError(f"not a schedule: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSize:
    """Size of one launch: `m` rows of the GEMM on every rank in `segments` runs that are each shared out by rank."""

    m: int
    n: int
    k: int
    world: int = 1
    segments: int = 1

    def tiles(self, config: KernelConfig) -> int:
        """Tiles of the whole product."""
        return ceil(self.m / config.block_m) * ceil(self.n / config.block_n)

    def tiles_per_owner(self, config: KernelConfig) -> int:
        """Tiles of the rank that owns most."""
        tiles_n = ceil(self.n / config.block_n)
        if config.operator == "gemm_reduce_scatter":
            segment_rows = self.m // self.segments // self.world
            return ceil(segment_rows / config.block_m) * self.segments * tiles_n
        return ceil(ceil(self.m / config.block_m) * tiles_n / self.world)

    def tile_us(self, config: KernelConfig) -> float:
        """Predicted time of one tile on one SM."""
        flop_us = 2 * config.block_m * config.block_n * self.k / SM_FLOP_PER_US
        load_us = 2 * (config.block_m + config.block_n) * self.k / _SM_LOAD_BYTES_PER_US
        return max(flop_us / _EFFICIENCY[config.block_m, config.block_n], load_us)

    def sent_us(self, config: KernelConfig) -> float:
        """Time that this rank's pushes take on the link."""
        hops = {"gemm": 0, "gemm_reduce_scatter": 1, "gemm_all_reduce": 2}[config.operator]
        return hops * self.hop_us()

    def hop_us(self) -> float:
        """Time that the partials take on the link."""
        return self.m * self.n * 2 * (self.world - 1) / self.world / LINK_BYTES_PER_US


def choose_schedule(config: KernelConfig, size: LaunchSize, max_grid: int) -> TileSchedule:
    """Grid by waves, lag of one or two waves, pushes paced unless the link is what takes longest.

    Units: `max_grid` blocks, the SMs less those kept free for others.
    """
    per_owner = size.tiles_per_owner(config)
    positions = per_owner * size.world
    waves = ceil(positions / max_grid)
    grid = ceil(positions / waves)
    grid = min(ceil(grid / size.world) * size.world, max_grid)
    if size.world == 1:  # nothing is gained by leaving SMs idle: the clock falls less than the work spreads
        return TileSchedule(grid=min(positions, max_grid), raster_group=_ALONE_RASTER)
    compute_us = waves * size.tile_us(config)
    link_bound = size.sent_us(config) >= _LINK_BOUND * compute_us
    # Few waves: two of them before the first own tile would leave the link idle at the end. Two waves of large partials
    # would wait for each other on a busy link, and of any where finished tiles are copied out as well.
    large = config.block_m * config.block_n >= _LARGE_TILE and config.operator == "gemm_reduce_scatter"
    flooded = size.hop_us() >= _LINK_BUSY * compute_us and (large or config.broadcast == "staged")
    lag_positions = grid if flooded or (waves <= 4 and compute_us < _SHORT_US) else 2 * grid
    pace_ns = 0 if link_bound else int(_PACED_SHARE * size.tile_us(config) * 1000 / config.num_panels)
    schedule = TileSchedule(grid=grid, lag=max(1, ceil(lag_positions / (size.world - 1))), pace_ns=pace_ns)
    if config.operator != "gemm_reduce_scatter" or lag_positions == grid:
        return schedule
    band_tiles = schedule.raster_group * ceil(size.n / config.block_n)
    return replace(schedule, lag=whole_band(schedule.lag, band_tiles, per_owner))


def choose_tile(config: KernelConfig, size: LaunchSize, max_grid: int) -> KernelConfig:
    """The same operator with the tile whose predicted time is shortest."""

    def predicted_us(candidate: KernelConfig) -> float:
        waves = ceil(size.tiles_per_owner(candidate) * size.world / max_grid)
        return waves * (size.tile_us(candidate) + TILE_START_US)

    candidates = [config.with_tile(*tile) for tile in TILES]
    return min(reversed(candidates), key=predicted_us)
