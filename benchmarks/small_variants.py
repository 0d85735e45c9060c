"""The variants of this project's kernels at few rows: what the runtime chooses, and all that it could choose."""

from __future__ import annotations

from dataclasses import replace

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
        chosen = stream_schedule(config, size, num_sms())
        schedules = {chosen, replace(chosen, pace_ns=0), replace(chosen, lag=0)}
        for schedule in sorted(schedules, key=lambda one: (one.lag, one.pace_ns)):
            variant = Variant(config=config, schedule=schedule)
            found.append((f"mkcompile {variant.text}", variant))
    return found


def _is_sensible(config: KernelConfig, size: LaunchSize) -> bool:
    """Not too few blocks, not too many waves, not mostly padding."""
    waves, tile_n = size.tiles(config) * config.split / num_sms(), config.block_n
    wastes = (config.block_m == 128 and size.m <= 64) or (config.block_m == 64 and size.m > 128)
    idles = (config.ping_pong and waves <= 1) or (config.split > 1 and waves > 1 and not config.ping_pong)
    slow = config.block_n == 32 or (config.split == 4 and not config.ping_pong) or (size.m >= 512 and tile_n == 64)
    fits = can_stream(config, size) and 0.4 <= waves <= _MOST_WAVES * config.split
    return fits and not (wastes or idles or slow)
