"""One all-gather launch over several nodes: the kernel that multiplies and, beside it, the kernel that moves shards.

A shard goes by the network once to each node, from node to node, and inside a node over NVLink. Sizes and shapes as in
`gather_launch.py`; `GatherSize.world` counts the ranks of all nodes. Rows only: shards that are columns are refused.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache
from math import ceil

from mkcompile.errors import OperatorInputError, WorkspaceError
from mkcompile.runtime import abi, driver, gather_abi, network_abi, nvrtc, tensor_map
from mkcompile.runtime.chain import StreamOperations
from mkcompile.runtime.gather_abi import ENGINE_COPIES
from mkcompile.runtime.gather_launch import (
    ELEMENT_BYTES,
    GatherLaunch,
    GatherSchedule,
    GatherSize,
    check_operands,
    fill_maps,
    fill_words,
)
from mkcompile.runtime.gather_schedule import GatherChoice
from mkcompile.runtime.identity import LaunchIdentity
from mkcompile.runtime.kernel import OPTIONS, LoadedKernel
from mkcompile.runtime.kernel_cache import compiled
from mkcompile.runtime.kernel_config import BLOCK_K, GATHER_TILES, NUM_THREADS, KernelConfig
from mkcompile.runtime.side_stream import SideStreams

_RASTER_GROUP = 4
_MOST_THREADS = 512
#: Bytes of one network message: long enough that its cost is small, and short beside a shard.
_CHUNK_BYTES = 1 << 20
#: Blocks that send the own shard: 3 beside a GEMM move more than a NIC does. Those that pass others' on: NVLink's rate.
_OWN_BLOCKS, _RELAY_BLOCKS = 3, 8


def mover_source() -> str:
    """The mover's translation unit."""
    parameters = (
        "const __grid_constant__ mk::NetworkLaunchArguments args, const __grid_constant__ mk::GatherArguments gather"
    )
    return (
        "namespace mk { inline constexpr bool kTrace = false; }\n"
        '#include "device/network/gather_mover.cuh"\n'
        f'extern "C" __global__ void __launch_bounds__({_MOST_THREADS}, 1) mk_mover({parameters}) {{\n'
        "  mk::run_gather_mover(args, gather);\n}\n"
    )


@cache
def mover_cubin() -> nvrtc.Cubin:
    """Its machine code, from this process, from disk, or from the compiler.

    Raises: CompileError; UnsupportedDeviceError where NVRTC is not installed.
    """
    source = mover_source() + network_abi.assertions() + gather_abi.assertions()
    return compiled("network_gather_mover", source, OPTIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoverDevice:
    """One device: the mover and its streams."""

    function: ctypes.c_void_p
    sides: SideStreams

    @staticmethod
    def on(device_idx: int, streams: StreamOperations) -> MoverDevice:
        """Not while a graph is captured. Raises: DriverError, CompileError."""
        function = driver.load_function(mover_cubin().image, "mk_mover", 0, device_idx)
        return MoverDevice(function=function, sides=SideStreams.on(device_idx, streams))


@dataclass(frozen=True, slots=True, kw_only=True)
class MoverGrid:
    """Blocks of the mover: one that controls, `own` that send this rank's shard, `relays` that pass others' on."""

    own: int = _OWN_BLOCKS
    relays: int = 0
    threads: int = _MOST_THREADS

    def __post_init__(self) -> None:
        if self.own < 1 or self.relays < 0 or not 64 <= self.threads <= _MOST_THREADS or self.threads % 32:
            raise ValueError(f"not a mover: {self}")

    @property
    def blocks(self) -> int:
        """All of them: so many SMs are not for the kernel that multiplies."""
        return 1 + self.own + self.relays


def mover_grid(local_world: int, returned: bool) -> MoverGrid:
    """What the ranks of a node need; alone on it a rank passes nothing on."""
    return MoverGrid(relays=_RELAY_BLOCKS if local_world > 1 or returned else 0)


def network_group_rows(size: GatherSize, config: KernelConfig) -> int:
    """Rows of one network message: about a megabyte, and no tile needs rows of many."""
    rows = max(1, _CHUNK_BYTES // (size.k * ELEMENT_BYTES))
    return min(config.block_m * ceil(rows / config.block_m) if rows > config.block_m else rows, size.shard_rows)


def network_choice(config: KernelConfig, size: GatherSize, max_grid: int, returned: bool) -> GatherChoice | None:
    """How a launch is carried out; None for shards that no kernel gathers over nodes. Movers have SMs of their own."""
    if size.columns or (config.block_m, config.block_n) not in GATHER_TILES:
        return None
    blocks = mover_grid(2 if config.network == "hierarchical" else 1, returned).blocks
    schedule = GatherSchedule(
        grid=max(1, max_grid - blocks),
        mover=ENGINE_COPIES,
        group_rows=network_group_rows(size, config),
        raster_group=_RASTER_GROUP,
    )
    return GatherChoice(variant="network", config=config, schedule=schedule, us=0.0)


def region_demand(schedule: GatherSchedule, size: GatherSize, node_world: int) -> tuple[int, int]:
    """Tiles for which a workspace must have flags, and bytes of a staging region."""
    messages = ceil(size.shard_rows / schedule.group_rows) * node_world
    return 4 * messages, size.world * size.shard_bytes


def _check(config: KernelConfig, launch: GatherLaunch, mover: MoverGrid) -> None:
    size, layout = launch.size, launch.peers.layout
    if config.operator != "all_gather_gemm" or config.network == "none" or launch.peers.network is None:
        raise OperatorInputError(f"{config.name} does not gather over several nodes")
    if size.columns or launch.landing or launch.schedule.order != gather_abi.APART:
        raise OperatorInputError("over several nodes rows are gathered, into the workspace")
    check_operands(config, launch)
    if mover.relays == 0 and (layout.world > 1 or launch.result):
        raise OperatorInputError("no block passes on what others send")
    chunks = ceil(size.shard_rows / launch.schedule.group_rows) * layout.world
    if chunks > layout.max_chunks:
        raise WorkspaceError(f"{chunks} messages from a node; this workspace has flags for {layout.max_chunks}")
    if size.world * size.shard_bytes > layout.region_bytes:
        raise WorkspaceError(
            f"gathered rows of {size.world * size.shard_bytes} bytes do not fit in a region of {layout.region_bytes} "
            f"bytes; raise MKCOMPILE_ARENA_BYTES"
        )


def _fill_arenas(gather: gather_abi.GatherArguments, config: KernelConfig, launch: GatherLaunch) -> None:
    """All ranks' shards, in the staging region of either parity."""
    size, layout, peers = launch.size, launch.peers.layout, launch.peers
    for parity in range(2):
        address = peers.workspaces[peers.rank] + layout.region_offset + parity * layout.region_bytes
        rows = (size.k, size.shard_rows * size.world)
        encoded = tensor_map.encode(address, config.dtype, rows, (size.k,), (BLOCK_K, config.block_m), 128)
        ctypes.memmove(gather.arena[parity], encoded, len(encoded))


class PreparedNetworkGather:
    """Both kernels of a launch with their argument blocks filled in, as `PreparedGather`.

    Raises: OperatorInputError, WorkspaceError.
    """

    def __init__(self, kernel: LoadedKernel, device: MoverDevice, launch: GatherLaunch, mover: MoverGrid) -> None:
        config, size = kernel.config, launch.size
        _check(config, launch, mover)
        packed = abi.aligned_block(network_abi.NetworkLaunchArguments)
        gather = abi.aligned_block(gather_abi.GatherArguments)
        plain = replace(launch, result=0)  # the mover returns the gathered tensor, by ordinary stores
        fill_words(packed, gather, plain)
        fill_maps(packed, gather, config, plain)
        _fill_arenas(gather, config, launch)
        gather.result, gather.parts = launch.result, mover.own
        layout, name = launch.peers.layout, config.name.removesuffix("_trace").removeprefix("all_gather_gemm_")
        self.identity = LaunchIdentity.of(
            f"all_gather_gemm {size.rows}x{'+'.join(map(str, size.n))}x{size.inner}, {size.segments} segments, rows on "
            f"{layout.nodes} nodes of {layout.world} ranks, {name}, messages of {launch.schedule.group_rows} rows"
        )
        packed.identity = self.identity.number
        if config.trace and launch.trace is not None:
            launch.trace.stamp(packed, f"{self.identity.text}, grid {launch.schedule.grid}", launch.peers.group)
        self._packed, self._gather, self._device, self._kernel = packed, gather, device, kernel
        self._parameters = (ctypes.c_void_p * 2)(ctypes.addressof(packed), ctypes.addressof(gather))
        self._attribute = driver.cooperative_attribute()
        self._multiply = driver.LaunchConfig(
            grid=(launch.schedule.grid, 1, 1), block=(NUM_THREADS, 1, 1), shared_bytes=config.shared_bytes,
            attributes=ctypes.pointer(self._attribute), num_attributes=1,
        )  # fmt: skip
        self._move = driver.LaunchConfig(
            grid=(mover.blocks, 1, 1), block=(mover.threads, 1, 1), shared_bytes=0, num_attributes=0
        )

    def run(self, stream: int, captured: bool = False) -> None:
        """Enqueue both on a stream of the kernel's device, which must be current; `captured`: into a graph.

        Raises: DriverError.
        """
        self._packed.is_captured = captured
        self._multiply.stream = stream
        device, launch = self._device, driver.library().cuLaunchKernelEx
        side = device.sides.part(stream)
        self._move.stream = side.handle
        code = launch(ctypes.byref(self._move), device.function, self._parameters, None)
        if code:
            driver.check(f"cuLaunchKernelEx(network_gather_mover, grid {self._move.grid[0]})", code)
        code = launch(ctypes.byref(self._multiply), self._kernel.function, self._parameters, None)
        if code:
            driver.check(f"cuLaunchKernelEx({self._kernel.config.name}, grid {self._multiply.grid[0]})", code)
        device.sides.end(side)
        device.sides.join(side, stream)
