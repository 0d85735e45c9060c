"""The variants of this project's kernels at few rows: what the runtime chooses, and all that it could choose."""

from __future__ import annotations

from mkcompile.runtime.kernel_config import TILES, OperatorName
from mkcompile.runtime.tile_schedule import choose_schedule

from .shapes import Shape
from .small_contenders import Variant, default_configs, default_variant, max_grid, size_of

Named = list[tuple[str, Variant]]
_MOST_WAVES = 12


def chosen_variants(op: OperatorName, shape: Shape, world: int) -> Named:
    """By the runtime's model."""
    size = size_of(op, shape, world)
    return [(name, default_variant(config, size, max_grid())) for name, config in default_configs(op)]


def swept_variants(op: OperatorName, shape: Shape, world: int) -> Named:
    """All tiles that are not absurd."""
    size = size_of(op, shape, world)
    found: Named = []
    for name, base in default_configs(op):
        for tile in TILES:
            config = base.with_tile(*tile)
            tiles = size.tiles_per_owner(config) * size.world
            if tiles > _MOST_WAVES * max_grid() or (tile[0] == 128 and size.m <= 64):
                continue
            variant = Variant(config=config, schedule=choose_schedule(config, size, max_grid()))
            found.append((f"{name} {variant.text}", variant))
    return found
