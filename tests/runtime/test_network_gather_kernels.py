"""The kernels of gathers over nodes compile to what was meant, and their launches refuse what they can't do."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace

import pytest

from mkcompile.config import settings
from mkcompile.errors import OperatorInputError, WorkspaceError
from mkcompile.runtime import network_gather, sources, tensor_map
from mkcompile.runtime.gather_abi import COLUMNS, ENGINE_COPIES
from mkcompile.runtime.gather_launch import GatherLaunch, GatherSchedule, GatherSize
from mkcompile.runtime.kernel import LoadedKernel, PeerTable, compile_kernel
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.network_gather import (
    MoverDevice,
    MoverGrid,
    PreparedNetworkGather,
    mover_cubin,
    mover_grid,
    network_group_rows,
)
from mkcompile.runtime.network_layout import NetworkShape, NetworkTable
from mkcompile.runtime.side_stream import SideStreams
from mkcompile.runtime.tensor_map import Matrix
from mkcompile.runtime.workspace_layout import WorkspaceLayout

from .. import machine_code
from ..gpu.broken_kernels import NO_CHUNK_WAIT, without
from .fakes import FakeStreams
from .test_kernels_compile import instructions

CONFIGS = [
    KernelConfig(operator="all_gather_gemm", network="flat"),
    KernelConfig(operator="all_gather_gemm", network="flat", block_n=128, weight_layout="kn", has_bias=True),
    KernelConfig(operator="all_gather_gemm", network="hierarchical", block_m=64, block_n=64, dtype="float16"),
]
SIZE = GatherSize(segment_rows=1000, k=264, n=(520, 8), world=4)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MKCOMPILE_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "mkcompile-kernels"))
    settings.cache_clear()
    yield
    settings.cache_clear()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_machine_code(config: KernelConfig) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    cubin = compile_kernel(config).cubin
    assert machine_code.faults(config, cubin.resources, instructions(cubin.image)) == []


def test_three_blocks_of_a_mover_share_an_sm() -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    resources = mover_cubin().resources
    assert resources.is_clean and resources.registers <= 80, resources


def test_the_planted_defect_still_fits() -> None:
    assert without(sources.headers(), *NO_CHUNK_WAIT) != sources.headers()


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Tensor maps that only remember what they were made of."""
    made: list[tuple[object, ...]] = []

    def encode(*what: object) -> ctypes.Array[ctypes.c_uint64]:
        made.append(what)
        return (ctypes.c_uint64 * 16)(len(made))

    monkeypatch.setattr(tensor_map, "encode", encode)
    return made


def launch_of(size: GatherSize = SIZE, arena_bytes: int = 32 << 20, order: int = 0) -> GatherLaunch:
    layout = WorkspaceLayout(world=2, nodes=2, total_bytes=arena_bytes, max_tiles=256)
    table = NetworkTable(
        shape=NetworkShape(node=1, nodes=2, local=0, world=2), ring_control=1 << 20, ring_slots=1 << 21, capacity=64
    )
    peers = PeerTable(
        rank=0, workspaces=(1 << 30, 2 << 30), layout=layout, fault_address=64, timeout_s=1.0, network=table
    )
    return GatherLaunch(
        shard=Matrix(4096, size.shard_rows, size.k, size.k),
        weights=tuple(Matrix(8192 * (i + 1), n, size.inner, size.inner) for i, n in enumerate(size.n)),
        outs=tuple(Matrix(1 << 16, size.rows, n, n) for n in size.n), biases=(0,) * len(size.n), size=size,
        schedule=GatherSchedule(grid=8, mover=ENGINE_COPIES, order=order, group_rows=100), peers=peers,
    )  # fmt: skip


def prepare(launch: GatherLaunch, mover: MoverGrid, config: KernelConfig = CONFIGS[2]) -> PreparedNetworkGather:
    kernel = LoadedKernel(config=config, device_idx=0, function=ctypes.c_void_p(1))
    device = MoverDevice(function=ctypes.c_void_p(2), sides=SideStreams(FakeStreams(), create=lambda: 3))
    return PreparedNetworkGather(kernel, device, launch, mover)


def test_arguments_describe_one_node_and_where_all_shards_lie(no_driver: list[tuple[object, ...]]) -> None:
    launch = launch_of()
    made = prepare(launch, mover_grid(2, returned=False))
    packed, gather, layout = made._packed, made._gather, launch.peers.layout
    assert (packed.rank, packed.world, packed.net.node, packed.net.nodes) == (0, 2, 1, 2)
    assert packed.net.flags_offset == layout.network_flags_offset and packed.net.ring_capacity == 64
    assert (gather.parts, gather.group_rows, gather.result, gather.landing) == (3, 100, 0, 0)
    region = (1 << 30) + layout.region_offset
    arenas = [what[0] for what in no_driver if what[2] == (SIZE.k, SIZE.shard_rows * 4)]
    assert arenas == [region, region + layout.region_bytes]
    assert "2 nodes of 2 ranks" in made.identity.text and packed.identity == made.identity.number


@pytest.mark.parametrize(
    ("launch", "mover", "error", "text"),
    [
        (launch_of(order=COLUMNS), MoverGrid(relays=1), OperatorInputError, "rows are gathered"),
        (launch_of(arena_bytes=2 << 20), MoverGrid(relays=1), WorkspaceError, "MKCOMPILE_ARENA_BYTES"),
        (launch_of(), MoverGrid(), OperatorInputError, "no block passes on"),
        (replace(launch_of(), biases=(16, 0)), MoverGrid(relays=1), OperatorInputError, "adds no bias"),
        (launch_of(replace(SIZE, segment_rows=4000)), MoverGrid(relays=1), WorkspaceError, "messages"),
    ],
    ids=["columns", "room", "relays", "bias", "flags"],
)
def test_what_a_launch_can_not_be_is_refused(
    no_driver: list[tuple[object, ...]], launch: GatherLaunch, mover: MoverGrid, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        prepare(launch, mover)


def test_messages_are_about_a_megabyte_and_whole_tiles_where_rows_are_short() -> None:
    config = KernelConfig(operator="all_gather_gemm", network="flat")
    for k, rows, expected in ((8192, 4096, 64), (16384, 4096, 32), (512, 4096, 1024), (512, 100, 100), (1 << 20, 9, 1)):
        assert network_group_rows(GatherSize(segment_rows=rows, k=k, n=(8,), world=2), config) == expected


def test_a_mover_of_ranks_alone_on_their_nodes_relays_nothing() -> None:
    assert mover_grid(1, returned=False).blocks == 4
    assert mover_grid(1, returned=True).relays > 0 and mover_grid(8, returned=False).relays > 0
    with pytest.raises(ValueError, match="not a mover"):
        MoverGrid(threads=100)
    assert network_gather.mover_source().count("mk_mover") == 1
