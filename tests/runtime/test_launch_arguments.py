"""What a launch refuses before it touches a device, and the host's arithmetic against the device's."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from itertools import product

import pytest
import torch

from mkcompile.errors import OperatorInputError, WorkspaceError
from mkcompile.runtime.kernel import LaunchArguments, LoadedKernel, PeerTable, PreparedLaunch
from mkcompile.runtime.kernel_config import TILES, KernelConfig
from mkcompile.runtime.tensor_map import Matrix
from mkcompile.runtime.tile_schedule import LaunchSize, TileSchedule, choose_schedule, choose_tile
from mkcompile.runtime.workspace_layout import WorkspaceLayout

from .device_schedule import walk

LAYOUT = WorkspaceLayout(world=2, total_bytes=64 << 20, max_tiles=1024)
PEERS = PeerTable(rank=0, workspaces=(4096, 8192), layout=LAYOUT, fault_address=4096, timeout_s=1.0)
SCATTER = KernelConfig(operator="gemm_reduce_scatter")
GOOD = LaunchArguments(
    terms=((Matrix(4096, 256, 64, 64), Matrix(4096, 512, 64, 64)),), out=Matrix(4096, 128, 512, 512),
    schedule=TileSchedule(grid=4, lag=2), peers=PEERS,
)  # fmt: skip


def loaded(config: KernelConfig) -> LoadedKernel:
    """Never launched here."""
    return LoadedKernel(config=config, device_idx=0, function=ctypes.c_void_p(0))


def term(a: tuple[int, int], weight: tuple[int, int]) -> tuple[Matrix, Matrix]:
    return Matrix(4096, *a, a[1]), Matrix(4096, *weight, weight[1])


@pytest.mark.parametrize(
    ("config", "wrong", "says"),
    [
        (SCATTER, {"peers": None}, "needs peers"),
        (KernelConfig(), {}, "takes no peers"),
        (SCATTER, {"terms": ()}, "0 products"),
        (SCATTER, {"terms": (term((256, 64), (504, 64)),)}, "weight"),
        (SCATTER, {"terms": (term((256, 64), (512, 64)), term((128, 64), (512, 64)))}, "a 128x64"),
        (SCATTER, {"out": Matrix(4096, 256, 512, 512)}, "256 rows"),
        (SCATTER, {"segments": 3}, "3 segments"),
        (SCATTER, {"bias": 4096}, "bias"),
        (SCATTER, {"schedule": TileSchedule(grid=4)}, "lag"),
        (
            KernelConfig(operator="gemm_all_reduce", broadcast="direct"),
            {"out": Matrix(4096, 256, 512, 512)},
            "2 results",
        ),
        (
            KernelConfig(operator="gemm_all_reduce", broadcast="direct"),
            {"out": Matrix(4096, 256, 512, 512), "adds": True},
            "can't add",
        ),
        (KernelConfig(operator="gemm_reduce_scatter", streams=True, block_n=64), {"adds": True}, "can't add"),
    ],
)
def test_wrong_arguments_are_refused_by_name(config: KernelConfig, wrong: dict[str, object], says: str) -> None:
    with pytest.raises(OperatorInputError, match=says):
        PreparedLaunch(loaded(config), replace(GOOD, **wrong))  # type: ignore[arg-type]


def test_unaligned_operands_are_refused() -> None:
    base = torch.zeros(64, 64, dtype=torch.bfloat16)
    assert Matrix.of(base[:, 8:]).columns == 56
    for view in (base[:, 1:], torch.zeros(64, 60, dtype=torch.bfloat16), base.t()):
        with pytest.raises(OperatorInputError):
            Matrix.of(view)


def test_ring_takes_what_fits_and_no_more_than_it_needs() -> None:
    assert LAYOUT.slots_for(SCATTER, 3).slots == 3
    ring = LAYOUT.slots_for(SCATTER, 1000)
    assert ring.slots * SCATTER.tile_bytes <= LAYOUT.region_bytes < (ring.slots + 1) * SCATTER.tile_bytes
    staged = KernelConfig(operator="gemm_all_reduce", broadcast="staged")
    half = LAYOUT.slots_for(staged, 1000)
    assert half.final_offset == half.slots * staged.tile_bytes
    assert 2 * half.slots * staged.tile_bytes <= LAYOUT.region_bytes
    with pytest.raises(WorkspaceError, match="1025 tiles"):
        LAYOUT.slots_for(SCATTER, 1025)
    with pytest.raises(WorkspaceError, match="MKCOMPILE_ARENA_BYTES"):
        WorkspaceLayout(world=8, total_bytes=1 << 20, max_tiles=64).slots_for(SCATTER, 64)


def test_host_counts_tiles_as_the_device_does() -> None:
    scatter = KernelConfig(operator="gemm_reduce_scatter", block_m=128, block_n=128)
    reduce_ = KernelConfig(operator="gemm_all_reduce", broadcast="direct", block_m=128, block_n=128)
    for world, rows, n, segments in product((2, 3, 4), (1, 128, 300), (8, 520), (1, 3)):
        order = walk(scatters=True, world=world, rank=0, segment_rows=rows, n=n, lag=2, grid=4, segments=segments)
        size = LaunchSize(m=rows * world * segments, n=n, k=64, world=world, segments=segments)
        assert size.tiles_per_owner(scatter) * world == len(order)
        order = walk(scatters=False, world=world, rank=0, segment_rows=rows, n=n, lag=2, grid=4)
        assert LaunchSize(m=rows, n=n, k=64, world=world).tiles_per_owner(reduce_) * world == len(order)


def test_schedules_suit_any_size() -> None:
    for (m, n, k), world, tile in product(((1, 8, 8), (4096, 8192, 3584), (65536, 512, 128)), (1, 2, 4, 8), TILES):
        operator = "gemm_reduce_scatter" if world > 1 else "gemm"
        config = KernelConfig(operator=operator, block_m=tile[0], block_n=tile[1])  # type: ignore[arg-type]
        size = LaunchSize(m=m * world, n=n, k=k, world=world)
        schedule = choose_schedule(config, size, 128)
        assert 1 <= schedule.grid <= 128
        assert schedule.lag >= 1 or world == 1
        waves = -(-size.tiles_per_owner(config) * world // 128)
        assert -(-size.tiles_per_owner(config) * world // schedule.grid) <= waves


def test_large_products_take_the_large_tile_and_small_ones_a_small_one() -> None:
    large = choose_tile(KernelConfig(), LaunchSize(m=8192, n=8192, k=4096), 128)
    assert (large.block_m, large.block_n) == (128, 256)
    small = choose_tile(KernelConfig(), LaunchSize(m=16, n=4096, k=4096), 128)
    assert small.block_m == 64 and small.block_n <= 64
    waves = choose_tile(KernelConfig(), LaunchSize(m=2048, n=7168, k=8192), 128)
    assert waves.block_n == 224, "512 tiles, four whole waves"
