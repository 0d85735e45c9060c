"""The variants of this project's kernels at few rows: what the runtime chooses, and all that it could choose."""

from __future__ import annotations

from dataclasses import replace

from mkcompile.ops.problem import Problem
from mkcompile.plan.decide import Policy, decide
from mkcompile.plan.topology import preset
from mkcompile.runtime.form import Form
from mkcompile.runtime.kernel_config import (
    HANDS_OVER,
    PING_PONG,
    SHARES_ENDS,
    STREAM_FORMS,
    KernelConfig,
    OperatorName,
)
from mkcompile.runtime.stream_schedule import StreamForm, Way, can_stream, stream_config, stream_tactic
from mkcompile.runtime.tactics import from_plan
from mkcompile.runtime.tile_schedule import LaunchSize

from .shapes import Shape
from .small_contenders import Variant, default_configs, default_variant, max_grid, num_sms, size_of

Named = list[tuple[str, Variant]]
_MOST_WAVES = 8
_MANY_ROWS = 512
_SMALL_K = 2048
_PACES = (0.0, 0.5, 1.0, 1.5)
_WIDE_K = (2048, 4096)  # where one wave of 128x256 tiles is fastest
_LEAST_K = 512  # of each block of a cluster that has several tiles


def chosen_variants(op: OperatorName, shape: Shape, world: int) -> Named:
    """By the planner; the GEMM alone, which no operator launches, by what the sweep says."""
    if op == "gemm":
        return [("mkcompile", _gemm_variant(size_of(op, shape, world)))]
    planned = [(name, _planned(config, shape, world)) for name, config in default_configs(op)]
    if planned[0][1].config.streams:  # the same whichever way the others store their results
        return [("mkcompile", planned[0][1])]
    return planned


def _planned(config: KernelConfig, shape: Shape, world: int) -> Variant:
    """The planner's choice among the streaming kernels and the others that store results in the config's way."""
    size = size_of(config.operator, shape, world)
    problem = Problem(
        operator=config.operator, m=shape.m, n=shape.n, k=shape.k, world_size=world, dtype="bfloat16", dtype_bytes=2
    )
    variant = {"gemm_reduce_scatter": "push"}.get(config.operator, config.broadcast)
    available = frozenset({f"{config.operator}/{variant}", f"{config.operator}/stream"})
    policy = Policy(fuse="always", reserve_sms=num_sms() - max_grid(), available=available)
    plan = decide(problem, preset("2xh200"), policy).plan
    form = Form(config=config, size=size, out_shape=(shape.m, shape.n), scale=1.0)
    tactic = from_plan(form, plan, max_grid())
    assert tactic is not None, plan
    return Variant(config=tactic[0], schedule=tactic[1])


def _gemm_variant(size: LaunchSize) -> Variant:
    rows = 64 if size.m <= 64 else 128
    wide = -(-size.m // 128) * -(-size.n // 256)
    if wide > num_sms():
        return default_variant(KernelConfig(), size, num_sms())
    fills = wide >= 0.9 * num_sms() and _WIDE_K[0] <= size.k <= _WIDE_K[1]
    columns = 64 if size.m <= 128 else 256 if fills else 128
    tiles = -(-size.m // rows) * -(-size.n // columns)
    split = 2 if 2 * tiles <= num_sms() else 1
    return _streaming(KernelConfig(), size, StreamForm((rows, columns), split))


def _streaming(base: KernelConfig, size: LaunchSize, form: StreamForm) -> Variant:
    config, schedule = stream_tactic(base, size, form, num_sms())
    return Variant(config=config, schedule=schedule)


def swept_variants(op: OperatorName, shape: Shape, world: int) -> Named:
    """Every streaming kernel that the planner may take and is not absurd, some that it does not, and the others' choice
    of tiles.
    """
    size = size_of(op, shape, world)
    found: Named = []
    if shape.m >= _MANY_ROWS:
        found += [
            (f"{name} {variant.text}", variant)
            for name, base in default_configs(op)
            for variant in [default_variant(base, size, max_grid())]
        ]
    base = default_configs(op)[0][1]
    forms = dict.fromkeys((*STREAM_FORMS, *PING_PONG, *(() if base.reduces else (((128, 256), 1),))))
    for tile, split in forms:
        if _is_sensible(stream_config(base, tile, split), size):
            variants = [_streaming(base, size, StreamForm(tile, split, way)) for way in _ways(base, size, tile, split)]
            found += [(f"mkcompile {variant.text}", variant) for variant in variants]
    return found


def paced_variants(op: OperatorName, shape: Shape, world: int) -> Named:
    """Those of the sweep that spread what they send, at other paces, too."""
    paced = [
        Variant(config=one.config, schedule=replace(one.schedule, pace_ns=int(share * one.schedule.pace_ns)))
        for _, one in swept_variants(op, shape, world)
        for share in _PACES
        if one.config.streams and one.schedule.pace_ns > 0 and one.config.block_m * one.config.block_n > 64 * 64
    ]
    return [(f"mkcompile {variant.text}", variant) for variant in paced]


def _ways(base: KernelConfig, size: LaunchSize, tile: tuple[int, int], split: int) -> list[Way]:
    """What the groups of a block with several tiles may do."""
    together = stream_config(base, tile, split)
    if size.tiles(together) * split <= num_sms():
        return ["together"]
    known: tuple[tuple[Way, bool], ...] = (
        ("turns", (tile, split) in PING_PONG), ("handed", base.reduces and (tile, split) in HANDS_OVER),
        ("together", split > 1), ("ends", base.operator == "gemm_all_reduce" and (tile, split) == SHARES_ENDS),
    )  # fmt: skip
    return [way for way, offered in known if offered] or ["together"]


def _is_sensible(config: KernelConfig, size: LaunchSize) -> bool:
    """Not too few blocks, not too many waves, not mostly padding."""
    waves, tile_n = size.tiles(config) * config.split / num_sms(), config.block_n
    small = config.block_m == 64 and tile_n == 64
    wastes = (config.block_m == 128 and size.m <= 64) or (small and size.m > 128 and size.k >= _SMALL_K)
    slow = size.m >= _MANY_ROWS and config.block_m * tile_n < 128 * 128 and size.k > _SMALL_K
    fits = can_stream(config, size) and 0.4 <= waves <= _MOST_WAVES * config.split
    turns = ((config.block_m, tile_n), config.split) in PING_PONG and size.k >= _LEAST_K * config.split
    return fits and not (wastes or slow or (config.split > 1 and waves > 1 and not turns))
