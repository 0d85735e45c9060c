"""Few rows: which streaming kernel, if any, a launch should take, and on how many blocks."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from mkcompile.runtime.kernel_config import BLOCK_K, SPLITS, STREAM_TILES, KernelConfig
from mkcompile.runtime.tile_schedule import LaunchSize, TileSchedule
from mkcompile.runtime.workspace_layout import MAILBOX_BYTES

# SMs of the smallest corner of the chip: clusters do not reach over its edge, and the few SMs beyond are of no use.
_CORNER_SMS = 16


def most_clusters(config: KernelConfig, num_sms: int) -> int:
    """Clusters that are resident at once."""
    usable = num_sms if config.split == 1 or num_sms < _CORNER_SMS else num_sms // _CORNER_SMS * _CORNER_SMS
    return max(1, usable // config.split)


def stream_schedule(config: KernelConfig, size: LaunchSize, num_sms: int) -> TileSchedule:
    """Every tile at once where they fit; else as many blocks as share them out evenly."""
    tiles = size.tiles(config)
    waves = -(-tiles // most_clusters(config, num_sms))
    return TileSchedule(grid=-(-tiles // waves) * config.split)


def stream_config(base: KernelConfig, tile: tuple[int, int], split: int) -> KernelConfig:
    """The streaming kernel of an operator, with its dtype, layout, bias and activation.

    Raises: OperatorInputError where the blocks of a cluster can't share such a tile.
    """
    return replace(base, streams=True, broadcast="none", block_m=tile[0], block_n=tile[1], split=split, stages=0)


def stream_configs(base: KernelConfig) -> list[KernelConfig]:
    """Every streaming kernel of an operator."""
    found = []
    for tile, split in product(STREAM_TILES, SPLITS):
        group_n = tile[1] if tile[0] == 128 else tile[1] // 2
        if group_n % (8 * split) == 0:
            found.append(stream_config(base, tile, split))
    return found


def can_stream(config: KernelConfig, size: LaunchSize) -> bool:
    """Whether such a launch is possible: each block has something to multiply, and all tiles fit into the mailboxes."""
    if size.k < BLOCK_K * config.split:
        return False
    return not config.reduces or 2 * (size.world - 1) * size.tiles(config) * config.tile_bytes <= MAILBOX_BYTES
