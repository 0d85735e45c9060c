"""Few rows: which streaming kernel, if any, a launch should take, and on how many blocks."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Literal, NamedTuple

from mkcompile.runtime.kernel_config import (
    BLOCK_K,
    HANDS_OVER,
    PING_PONG,
    SHARES_ENDS,
    SPLITS,
    STREAM_TILES,
    KernelConfig,
)
from mkcompile.runtime.tile_schedule import LINK_BYTES_PER_US, SM_FLOP_PER_US, LaunchSize, TileSchedule
from mkcompile.runtime.workspace_layout import MAILBOX_BYTES, MAILBOX_SHARE

# SMs of the smallest corner of the chip: clusters do not reach over its edge, and the few SMs beyond are of no use. Of
# clusters of four a sixteenth fewer fit: 30 of 132 SMs (decision 306).
_CORNER_SMS = 16
_CORNERS_FOR_4 = 15 / 16
# Share of the next tile's time over which a tile's partials are sent.
_PACED_SHARE = 0.6
# A little less than the link's own time, so that it never runs dry.
_LINK_SHARE = 0.95
# Products of a tile over the link's time of a wave, from where on groups take turns. Source: decision 306.
_TURNS_OVER_LINK = 0.75
_SCATTERED_IN_TURNS = ((128, 64), 2)
_CACHED_BYTES = 24 << 20
_UNIT_BYTES = 1024  # what one group stores at once. Source: Mailbox in csrc/device/mailbox.cuh


#: What the math groups of a block with several tiles do: multiply `together`, or in `turns`, or together while
#: others send what they have `handed` over; or in turns, with shared tiles at the cluster's `ends` only.
Way = Literal["together", "turns", "handed", "ends"]


class StreamForm(NamedTuple):
    """Tile (rows, columns), how many blocks share it, and the way; None: what is known to be best."""

    tile: tuple[int, int]
    split: int
    way: Way | None = None


def stream_tactic(
    base: KernelConfig, size: LaunchSize, form: StreamForm, num_sms: int
) -> tuple[KernelConfig, TileSchedule]:
    """Kernel and schedule. Where blocks have several tiles each, the math groups take turns, or hand partials over.

    Raises: OperatorInputError where the blocks of a cluster can't share such a tile.
    """
    way = form.way or _best_way(stream_config(base, form.tile, form.split), size, num_sms)
    config = stream_config(base, form.tile, form.split, ping_pong=way in ("turns", "ends"), hands_over=way == "handed")
    config = replace(config, shares_ends=way == "ends")
    return config, stream_schedule(config, size, num_sms)


def _best_way(together: KernelConfig, size: LaunchSize, num_sms: int) -> Way:
    """Turns hide all of a tile's epilogue, but its own group sends it, which must not take longer than the products of
    the other group's tile.
    """
    clusters, form = most_clusters(together, num_sms), ((together.block_m, together.block_n), together.split)
    waves = -(-size.tiles(together) // clusters)
    if waves == 1:
        return "together"
    if not together.reduces:
        return "turns" if form in PING_PONG else "together"
    if form == _SCATTERED_IN_TURNS:
        return "turns" if together.operator == "gemm_reduce_scatter" else "together"
    products_us = 2 * together.block_m * together.block_n * size.k / together.split / SM_FLOP_PER_US
    link_us = clusters * together.tile_bytes * (size.world - 1) / LINK_BYTES_PER_US
    if form in PING_PONG and (together.split > 1 or waves == 2 or products_us > _TURNS_OVER_LINK * link_us):
        return "turns"
    return "handed" if form in HANDS_OVER else "together"


def most_clusters(config: KernelConfig, num_sms: int) -> int:
    """Clusters that are resident at once."""
    if config.split == 1 or num_sms < _CORNER_SMS:
        return max(1, num_sms // config.split)
    usable = num_sms // _CORNER_SMS * _CORNER_SMS
    return int(usable * (_CORNERS_FOR_4 if config.split == 4 else 1)) // config.split


def stream_schedule(config: KernelConfig, size: LaunchSize, num_sms: int) -> TileSchedule:
    """Every tile at once where they fit; else as many blocks as share them out evenly."""
    tiles = size.tiles(config)
    waves = -(-tiles // most_clusters(config, num_sms))
    grid = -(-tiles // waves) * config.split
    return TileSchedule(grid=grid, raster_group=_band(config, size), pace_ns=_pace_ns(config, size, grid))


def _band(config: KernelConfig, size: LaunchSize) -> int:
    """Row tiles that are walked together: the rows of one owner, or all. Only where the peers' rows, which then all
    come first, are sent beside products, and where the weight stays in a cache between the owners.
    """
    kept = size.n * size.k * 2 <= _CACHED_BYTES and (config.hands_over or config.ping_pong)
    if config.operator == "gemm_reduce_scatter" and kept and size.segments == 1:
        owned = size.m // size.world
        if owned % config.block_m == 0:
            return owned // config.block_m
    return -(-size.m // config.block_m)


def _pace_ns(config: KernelConfig, size: LaunchSize, grid: int) -> int:
    """Between the units of a tile, which are sent while others are multiplied: over a share of the next tile's time,
    but no faster than the link takes what all blocks send: what waits for the link blocks an SM's loads.
    """
    if not (config.ping_pong or config.hands_over) or size.world == 1:
        return 0
    flop = 2 * config.block_m * config.block_n * size.k / config.split
    units = config.block_m // 64 * config.block_n // 8 // config.split * (size.world - 1)
    link_ns = _LINK_SHARE * _UNIT_BYTES * grid / LINK_BYTES_PER_US * 1000
    return int(max(_PACED_SHARE * flop / SM_FLOP_PER_US * 1000 / units, link_ns))


def stream_config(
    base: KernelConfig, tile: tuple[int, int], split: int, ping_pong: bool = False, hands_over: bool = False
) -> KernelConfig:
    """The streaming kernel of an operator, with its dtype, layout, bias and activation.

    Raises: OperatorInputError where the blocks of a cluster can't share such a tile.
    """
    return replace(
        base, streams=True, broadcast="none", split=split, ping_pong=ping_pong, hands_over=hands_over,
        block_m=tile[0], block_n=tile[1], stages=0,
    )  # fmt: skip


def stream_configs(base: KernelConfig) -> list[KernelConfig]:
    """Every streaming kernel of an operator."""
    found = []
    for tile, split in product(STREAM_TILES, SPLITS):
        group_n = tile[1] if tile[0] == 128 else tile[1] // 2
        if group_n % (8 * split) == 0 and (tile[1] < 256 or (split == 1 and not base.reduces)):
            found.append(stream_config(base, tile, split))
    found += [stream_config(base, tile, split, ping_pong=True) for tile, split in PING_PONG]
    if base.operator == "gemm_all_reduce":
        found.append(replace(stream_config(base, *SHARES_ENDS, ping_pong=True), shares_ends=True))
    handing = HANDS_OVER if base.reduces else ()
    return found + [stream_config(base, tile, split, hands_over=True) for tile, split in handing]


def can_stream(config: KernelConfig, size: LaunchSize, arena_bytes: int = MAILBOX_SHARE * MAILBOX_BYTES) -> bool:
    """Whether such a launch is possible: each block has something to multiply, and all tiles fit into the mailboxes.

    Units: `arena_bytes` bytes that a workspace may have.
    """
    if size.k < BLOCK_K * config.split:
        return False
    room_bytes = min(MAILBOX_BYTES, arena_bytes // MAILBOX_SHARE)
    return not config.reduces or 2 * (size.world - 1) * size.tiles(config) * config.tile_bytes <= room_bytes
