"""Which kernels there are to compile ahead: those that plans can be of, and those for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import get_args

from mkcompile.plan.kernels import plans_of_kernels
from mkcompile.runtime.form import Form
from mkcompile.runtime.gather_form import GatherForm
from mkcompile.runtime.gather_launch import GatherSize
from mkcompile.runtime.kernel_config import (
    GATHER_TILES,
    TILES,
    Activation,
    Broadcast,
    DtypeName,
    KernelConfig,
    Network,
    OperatorName,
    WeightLayout,
)
from mkcompile.runtime.tactics import from_plan, gather_from_plan
from mkcompile.runtime.tile_schedule import LaunchSize

DTYPES, LAYOUTS, NETWORKS = get_args(DtypeName), get_args(WeightLayout), get_args(Network)
_FORMS: tuple[tuple[OperatorName, Broadcast], ...] = (
    ("gemm_reduce_scatter", "none"), ("gemm_all_reduce", "staged"), ("gemm_all_reduce", "direct"),
    ("all_gather_gemm", "none"),
)  # fmt: skip
# What every kernel can carry out: which one a plan is of does not depend on the size.
_SIZE, _GATHERED = LaunchSize(m=64, n=64, k=256, world=2), GatherSize(segment_rows=32, k=256, n=(64,), world=2)
_GRID = 8


def launched_configs(
    dtypes: Sequence[DtypeName], layouts: Sequence[WeightLayout], networks: Sequence[Network] = ("none",)
) -> list[KernelConfig]:
    """What launches may ask for, with and without a bias, smallest tiles first: every kernel that a plan can be of.

    `networks`: how ranks lie on nodes, as `KernelConfig.network`.
    """
    kinds = product(networks, dtypes, layouts, (False, True))
    found = {config: None for kind in kinds for config in _of_kind(*kind)}
    return sorted(found, key=lambda one: (one.network, one.block_m * one.block_n))


def _of_kind(network: Network, dtype: DtypeName, layout: WeightLayout, has_bias: bool) -> Iterator[KernelConfig]:
    for operator, broadcast in _FORMS:
        if network != "none" and broadcast == "direct":  # results in place are inside a node
            continue
        base = KernelConfig(
            operator=operator, broadcast=broadcast, network=network, dtype=dtype, weight_layout=layout,
            has_bias=has_bias,
        )  # fmt: skip
        for plan in plans_of_kernels(operator, across_nodes=network != "none"):
            if operator == "all_gather_gemm":
                choice = gather_from_plan(GatherForm(config=base, size=_GATHERED, gathered_shape=()), plan, _GRID)
                config = choice.config if choice is not None else None
                if plan.variant == "push" and plan.split == 1 and network == "none":
                    yield replace(base.with_tile(plan.tile.rows, plan.tile.columns), returns=True)
            else:
                tactic = from_plan(Form(config=base, size=_SIZE, out_shape=(1, 1), scale=1.0), plan, _GRID)
                config = tactic[0] if tactic is not None else None
            assert config is not None, plan  # else the planner chooses what the launcher can't launch
            yield config


def all_configs() -> list[KernelConfig]:
    """The same in all dtypes, over nodes, too; and products alone and gathers that fetch, for tests and benchmarks."""
    kinds = [
        KernelConfig(dtype=dtype, weight_layout=layout, has_bias=has_bias)
        for dtype, layout, has_bias in product(DTYPES, LAYOUTS, (False, True))
    ]
    alone = [
        replace(kind, activation=activation).with_tile(*tile)
        for tile, activation, kind in product(TILES, get_args(Activation), kinds)
    ]
    fetching = [
        replace(kind, operator="all_gather_gemm", pulls=True, stages=0).with_tile(*tile)
        for tile, kind in product(GATHER_TILES, kinds)
    ]
    return list(dict.fromkeys((*launched_configs(DTYPES, LAYOUTS, NETWORKS), *alone, *fetching)))
