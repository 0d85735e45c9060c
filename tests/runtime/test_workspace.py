"""Sizes of workspaces: what a launch wants, when a workspace grows, what the cap does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mkcompile.errors import WorkspaceError
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.tile_schedule import LaunchSize, choose_schedule
from mkcompile.runtime.workspace import Demand, layout_for

REDUCE_SCATTER = KernelConfig(operator="gemm_reduce_scatter")
ALL_REDUCE = KernelConfig(operator="gemm_all_reduce", broadcast="staged")
CAP_BYTES = 1 << 30


def demand(config: KernelConfig, m: int, n: int, k: int, world: int = 2) -> Demand:
    size = LaunchSize(m=m, n=n, k=k, world=world)
    return Demand.of(config, choose_schedule(config, size, 128), size)


@pytest.mark.parametrize("config", [REDUCE_SCATTER, ALL_REDUCE], ids=["rs", "ar"])
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("size", [(1, 8, 8), (2048, 8192, 1024), (8192, 8192, 3584), (32768, 32768, 4096)], ids=str)
def test_a_layout_holds_the_slots_that_a_launch_wants(config: KernelConfig, world: int, size: tuple[int, ...]) -> None:
    m, n, k = size
    m = -(-m // world) * world
    launch = LaunchSize(m=m, n=n, k=k, world=world)
    schedule = choose_schedule(config, launch, 128)
    layout = layout_for(world, Demand.of(config, schedule, launch), 4 * CAP_BYTES, None)
    tiles = launch.tiles_per_owner(config)
    slots = layout.slots_for(config, tiles).slots
    assert slots >= min(tiles, schedule.lag + 2 * schedule.grid)


def test_the_largest_measured_shape_fits_the_default_cap() -> None:
    layout = layout_for(2, demand(ALL_REDUCE, 32768, 32768, 4096), CAP_BYTES, None)
    assert layout.total_bytes <= CAP_BYTES // 2


def test_a_workspace_never_shrinks_and_is_kept_while_it_serves() -> None:
    large = layout_for(2, demand(ALL_REDUCE, 8192, 8192, 1024), CAP_BYTES, None)
    assert layout_for(2, demand(ALL_REDUCE, 16, 64, 64), CAP_BYTES, large) is large
    assert layout_for(2, demand(ALL_REDUCE, 8192, 8192, 1024), CAP_BYTES, large) is large


def test_more_tiles_than_flags_make_a_new_workspace() -> None:
    config = REDUCE_SCATTER.with_tile(64, 32)
    small = layout_for(2, demand(config, 64, 64, 64), CAP_BYTES, None)
    many = layout_for(2, demand(config, 65536, 32768, 64), CAP_BYTES, small)
    assert many.max_tiles > small.max_tiles == 16384
    assert many.region_offset > small.region_offset


def test_beyond_the_cap_a_ring_has_fewer_slots() -> None:
    wanted = demand(ALL_REDUCE, 32768, 32768, 4096, world=8)
    layout = layout_for(8, wanted, CAP_BYTES // 4, None)
    assert layout.total_bytes == CAP_BYTES // 4
    assert layout.region_bytes < wanted.region_bytes


def test_a_cap_that_can_not_hold_the_flags_names_the_setting() -> None:
    with pytest.raises(WorkspaceError, match="MKCOMPILE_ARENA_BYTES"):
        layout_for(2, demand(ALL_REDUCE, 128, 128, 128), 4096, None)


@given(st.lists(st.tuples(st.integers(1, 1 << 20), st.integers(1, 1 << 31)), min_size=1, max_size=8))
def test_growth_depends_on_the_calls_alone(sizes: list[tuple[int, int]]) -> None:
    """Two ranks that make the same calls have the same layouts, and no call undoes what an earlier one needed."""
    layouts = []
    for _ in range(2):
        current = None
        for tiles, region_bytes in sizes:
            current = layout_for(2, Demand(tiles=tiles, region_bytes=region_bytes), CAP_BYTES, current)
        layouts.append(current)
    assert layouts[0] == layouts[1]
    last = layouts[0]
    assert last is not None and last.total_bytes <= CAP_BYTES
    for tiles, region_bytes in sizes:
        assert last.max_tiles >= tiles
        assert last.region_bytes >= region_bytes or last.total_bytes == CAP_BYTES
