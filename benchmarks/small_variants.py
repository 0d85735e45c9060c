"""The variants of this project's kernels at few rows: what the runtime chooses, and all that it could choose."""

from __future__ import annotations

from mkcompile.runtime.kernel_config import KernelConfig, OperatorName
from mkcompile.runtime.stream_schedule import can_stream, stream_configs, stream_schedule
from mkcompile.runtime.tile_schedule import LaunchSize

from .shapes import Shape
from .small_contenders import Variant, default_configs, default_variant, max_grid, num_sms, size_of

Named = list[tuple[str, Variant]]
_MOST_WAVES = 4


def chosen_variants(op: OperatorName, shape: Shape, world: int) -> Named:
    """By the runtime's model."""
    size = size_of(op, shape, world)
    return [(name, default_variant(config, size, max_grid())) for name, config in default_configs(op)]


def swept_variants(op: OperatorName, shape: Shape, world: int) -> Named:
    """The runtime's choice of tiles, and every streaming kernel that is not absurd."""
    size = size_of(op, shape, world)
    found = [(f"{name} {variant.text}", variant) for name, variant in chosen_variants(op, shape, world)]
    for config in stream_configs(default_configs(op)[0][1]):
        if not _is_sensible(config, size):
            continue
        variant = Variant(config=config, schedule=stream_schedule(config, size, num_sms()))
        found.append((f"mkcompile {variant.text}", variant))
    return found


def _is_sensible(config: KernelConfig, size: LaunchSize) -> bool:
    blocks = size.tiles(config) * config.split
    waves = blocks / num_sms()
    wastes = config.block_m == 128 and size.m <= 64
    return can_stream(config, size) and 0.4 <= waves <= _MOST_WAVES * config.split and not wastes
