"""Kernels: `compile_kernel(config)` to machine code, `load_kernel(...)` onto a device, `launch(...)` into a stream.

Nothing here knows of process groups or tensors: peers are tables of addresses, so that the ranks of a launch may be
processes that share symmetric memory, several GPUs of one process, or several streams of one GPU.

    kernel = load_kernel(compile_kernel(KernelConfig(operator="gemm_reduce_scatter")), device_idx=0)
    launch(kernel, LaunchArguments(terms=((a_MK, w_NK),), out=out, schedule=..., peers=PeerTable(...)), stream)

A launch needs its device to be current in the calling thread, as torch's own operators do.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

from mkcompile.errors import OperatorInputError
from mkcompile.runtime import abi, driver, identity, network_abi, nvrtc, tensor_map
from mkcompile.runtime.identity import LaunchIdentity
from mkcompile.runtime.kernel_cache import compiled
from mkcompile.runtime.kernel_config import BLOCK_K, NUM_THREADS, KernelConfig
from mkcompile.runtime.network_layout import NetworkTable, network_slots
from mkcompile.runtime.recorder import Recorder
from mkcompile.runtime.tensor_map import Matrix
from mkcompile.runtime.tile_schedule import LaunchSize, TileSchedule
from mkcompile.runtime.workspace_layout import WorkspaceLayout

ARCHITECTURE = "sm_90a"
#: Without NVRTC's own cache, which answers without the resource report.
OPTIONS = (f"--gpu-architecture={ARCHITECTURE}", "-std=c++20", "--ptxas-options=-v", "--no-cache")
_ENTRY_POINT = "mk_kernel"
_A_OFFSET, _WEIGHT_OFFSET, _OUT_OFFSET, _PEER_OUT_OFFSET = (
    getattr(abi.KernelArguments, name).offset for name in ("a", "weight", "out", "peer_out")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledKernel:
    """Machine code of one configuration."""

    config: KernelConfig
    cubin: nvrtc.Cubin


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedKernel:
    """A kernel on one device, ready to be launched."""

    config: KernelConfig
    device_idx: int
    function: ctypes.c_void_p


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTable:
    """The ranks of a launch as this device sees them: entry r is rank r's, this rank's own included.

    `workspaces` are addresses of workspaces of one `layout`, whose first `layout.region_offset` bytes were zero before
    the first launch on any rank. `outs` are the addresses of the results for `broadcast="direct"`, or their common
    multicast address. `fault_address` is
    an `abi.FaultReport` in host memory that the device can write.
    `outs_offset`: where the results lie in their common memory, equal on all ranks; -1 where they have none.
    `group`: the ranks as numbered in the whole job, where they have such numbers. `share_device`: some of them run on
    one device, so that a launch must not hold SMs before it can go on (tests).
    `network`: where the ranks are on several nodes; `workspaces`, `rank` and `group` are those of one node then.
    Units: `timeout_s` seconds that a wait for a peer may last; `outs_offset` bytes.
    """

    rank: int
    workspaces: tuple[int, ...]
    layout: WorkspaceLayout
    fault_address: int
    timeout_s: float
    outs: tuple[int, ...] = ()
    outs_offset: int = -1
    multicast: int = 0
    group: tuple[int, ...] = ()
    share_device: bool = False
    network: NetworkTable | None = None

    def __post_init__(self) -> None:
        if (self.network is None) != (self.layout.nodes == 1):
            raise OperatorInputError(f"a workspace for {self.layout.nodes} nodes, network {self.network}")
        if len(self.workspaces) != self.layout.world or not 0 <= self.rank < self.layout.world:
            raise OperatorInputError(f"rank {self.rank}, {len(self.workspaces)} workspaces, {self.layout.world} ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchArguments:
    """One launch.

    Shapes: terms[i] is (a_MK, weight_NK or weight_KN by the kernel's layout); the GEMM sums over them. out is [m, n],
    for reduce-scatter this rank's [m / world, n]. A reduce-scatter whose rows are [segments, world, rows] in memory
    says how many `segments` there are. bias [n] is added to this rank's product (0: none). `scale` multiplies the sum.
    A kernel that was compiled to be traced writes into `trace`. One that can (`KernelConfig.can_add`) `adds` to what
    lies in `out`, whatever its peers do.
    """

    terms: tuple[tuple[Matrix, Matrix], ...]
    out: Matrix
    schedule: TileSchedule
    peers: PeerTable | None = None
    bias: int = 0
    segments: int = 1
    scale: float = 1.0
    trace: Recorder | None = None
    adds: bool = False

    def __post_init__(self) -> None:
        if not 1 <= len(self.terms) <= abi.MAX_TERMS:
            raise OperatorInputError(f"{len(self.terms)} products; one launch sums 1 to {abi.MAX_TERMS}")

    @property
    def size(self) -> LaunchSize:
        """Size of the launch."""
        return LaunchSize(
            m=self.terms[0][0].rows,
            n=self.out.columns,
            k=sum(a.columns for a, _ in self.terms),
            world=self.peers.layout.ranks if self.peers else 1,
            segments=self.segments,
        )


def translation_unit(config: KernelConfig) -> str:
    """The source of a configuration, with the assertions of what the host mirrors."""
    return config.source() + abi.assertions()


@lru_cache(maxsize=1024)
def compile_kernel(config: KernelConfig) -> CompiledKernel:
    """Machine code for a configuration, from this process, from disk, or from the compiler (about 1 s).

    Raises: CompileError; UnsupportedDeviceError where NVRTC is not installed.
    """
    return CompiledKernel(config=config, cubin=compiled(config.name, translation_unit(config), OPTIONS))


@lru_cache(maxsize=1024)
def load_kernel(kernel: CompiledKernel, device_idx: int) -> LoadedKernel:
    """Load onto a device, once. Do this before any launch of it spins: loading may wait for the device.

    Raises: UnsupportedDeviceError where there is no driver; DriverError.
    """
    function = driver.load_function(kernel.cubin.image, _ENTRY_POINT, kernel.config.shared_bytes, device_idx)
    return LoadedKernel(config=kernel.config, device_idx=device_idx, function=function)


def _check_arguments(config: KernelConfig, arguments: LaunchArguments) -> None:
    size = arguments.size
    across = arguments.peers is not None and arguments.peers.network is not None
    if across != (config.network != "none"):
        raise OperatorInputError(f"{config.name} is for {'one node' if across else 'several nodes'}")
    if config.reduces != (arguments.peers is not None):
        raise OperatorInputError(f"{config.operator} {'needs' if config.reduces else 'takes no'} peers")
    for a, weight in arguments.terms:
        weight_shape = (size.n, a.columns) if config.weight_layout == "nk" else (a.columns, size.n)
        if a.rows != size.m or (weight.rows, weight.columns) != weight_shape:
            raise OperatorInputError(f"a {a.rows}x{a.columns}, weight {weight.rows}x{weight.columns}, n {size.n}")
        if a.columns % 8 or a.columns < 8:
            raise OperatorInputError(f"k must be a multiple of 8, got {a.columns}")
    if size.m < 1 or size.n < 8 or size.n % 8:
        raise OperatorInputError(f"m must be at least 1 and n a multiple of 8, got m={size.m} n={size.n}")
    owners = size.world if config.operator == "gemm_reduce_scatter" else 1
    if size.m % (arguments.segments * owners) or arguments.out.rows * owners != size.m:
        raise OperatorInputError(
            f"{size.m} rows, {arguments.segments} segments, {size.world} ranks, a result of {arguments.out.rows} rows"
        )
    if arguments.adds and not config.can_add:
        raise OperatorInputError(f"{config.name} can't add to what lies in its result")
    if config.has_bias != (arguments.bias != 0):
        raise OperatorInputError("the kernel's bias and the launch's differ")
    outs_needed = {"direct": size.world, "multicast": 1}.get(config.broadcast, 0)
    if arguments.peers is not None and len(arguments.peers.outs) != outs_needed:
        raise OperatorInputError(f"broadcast={config.broadcast!r} needs the addresses of {outs_needed} results")
    if config.streams:
        _check_split(config, arguments)


def _check_split(config: KernelConfig, arguments: LaunchArguments) -> None:
    """Whole clusters, and each of their blocks has something to multiply."""
    grid, split = arguments.schedule.grid, config.split
    k_blocks = sum(-(-a.columns // BLOCK_K) for a, _ in arguments.terms)
    if grid % split or k_blocks < split:
        raise OperatorInputError(f"{k_blocks} blocks of k for clusters of {split} in a grid of {grid}")


def _box_rows(config: KernelConfig, a: Matrix) -> int:
    """Rows of `a` that are loaded at once; a streaming kernel loads none that are not there."""
    return min(config.block_m, -(-a.rows // 8) * 8) if config.streams else config.block_m


def map_of_weight(config: KernelConfig, weight: Matrix) -> bytes:
    """Its tensor map, with boxes of a tile's columns and one k-block; of a weight [K, N] a panel's columns."""
    box = (BLOCK_K, config.block_n) if config.weight_layout == "nk" else (config.panel_n, BLOCK_K)
    sizes = weight.columns, weight.rows
    return tensor_map.encode(weight.pointer, config.dtype, sizes, (weight.stride,), box, min(128, box[0] * 2))


def _fill_maps(packed: abi.KernelArguments, config: KernelConfig, arguments: LaunchArguments) -> None:
    n = arguments.out.columns
    for i, (a, weight) in enumerate(arguments.terms):
        k = a.columns
        packed.k[i] = k
        box = (BLOCK_K, _box_rows(config, a))
        a_map = tensor_map.encode(a.pointer, config.dtype, (k, a.rows), (a.stride,), box, 128)
        weight_map = map_of_weight(config, weight)
        ctypes.memmove(packed.a[i], a_map, len(a_map))
        ctypes.memmove(packed.weight[i], weight_map, len(weight_map))
    out = arguments.out
    packed.out_address, packed.out_stride = out.pointer, out.stride
    if config.streams:
        return
    rows = out.rows // arguments.segments
    outs = arguments.peers.outs if arguments.peers else ()
    for target, pointer in [(packed.out, out.pointer), *zip(packed.peer_out, outs, strict=False)]:
        out_map = tensor_map.encode(
            pointer, config.dtype, (n, rows, arguments.segments), (out.stride, out.stride * rows),
            (config.panel_n, 64, 1), config.panel_n * 2,
        )  # fmt: skip
        ctypes.memmove(target, out_map, len(out_map))


def _fill_peers(packed: abi.KernelArguments, config: KernelConfig, arguments: LaunchArguments) -> None:
    peers = arguments.peers
    packed.world = 1
    packed.deadline_ns = 10_000_000_000
    if peers is None:
        return
    layout = peers.layout
    if isinstance(packed, network_abi.NetworkLaunchArguments):
        _fill_network(packed, config, arguments)
    elif config.streams:
        layout.require_mailbox(config, arguments.size.tiles(config))
    else:
        tiles = arguments.size.tiles_per_owner(config)
        slots = layout.slots_for(config, tiles)
        if slots.slots < tiles:  # a ring: what an own tile frees must come before the push that needs it
            packed.lag = min(packed.lag, slots.slots - 1)
        packed.slots, packed.final_offset = slots.slots, slots.final_offset
    fill_workspaces(packed, peers)
    packed.multicast = peers.multicast
    packed.mailbox_offset, packed.mailbox_bytes = layout.mailbox_offset, layout.mailbox_bytes


def fill_workspaces(packed: abi.KernelArguments, peers: PeerTable) -> None:
    """The ranks of the node, their workspaces, and the network where there are several nodes."""
    layout, table = peers.layout, peers.network
    packed.rank, packed.world = peers.rank, layout.world
    for rank, address in enumerate(peers.workspaces):
        packed.workspace[rank] = address
    packed.fault, packed.deadline_ns = peers.fault_address, int(peers.timeout_s * 1e9)
    packed.region_offset, packed.region_bytes = layout.region_offset, layout.region_bytes
    packed.max_tiles = layout.max_tiles
    if isinstance(packed, network_abi.NetworkLaunchArguments):
        assert table is not None
        net = packed.net
        net.ring_control, net.ring_slots, net.ring_capacity = table.ring_control, table.ring_slots, table.capacity
        net.node, net.nodes, net.max_chunks = table.shape.node, table.shape.nodes, layout.max_chunks
        net.header_offset, net.flags_offset = layout.network_offset, layout.network_flags_offset
        net.counters_offset = layout.network_counters_offset


def _fill_network(packed: network_abi.NetworkLaunchArguments, config: KernelConfig, arguments: LaunchArguments) -> None:
    """How the launch divides its staging region."""
    assert arguments.peers is not None
    layout, schedule, net = arguments.peers.layout, arguments.schedule, packed.net
    tiles = arguments.size.tiles_per_owner(config)
    slots = network_slots(layout, config, tiles, schedule.node_lag, schedule.chunk_bytes)
    if slots.local_slots < layout.nodes * tiles:
        packed.lag = min(packed.lag, slots.local_slots - 1)
    packed.slots, packed.final_offset = slots.local_slots, slots.final_offset
    net.chunk_tiles, net.slots, net.lag = slots.chunk_tiles, slots.slots, slots.lag
    net.inbox_offset, net.outbox_offset = slots.inbox_offset, slots.outbox_offset
    net.final_inbox_offset, net.final_outbox_offset = slots.final_inbox_offset, slots.final_outbox_offset


class Prepared:
    """A launch with its argument blocks filled in: `run` may be called again while pointers and sizes stay the same.

    It keeps no reference to memory; the caller keeps operands and workspaces alive until the stream is done. It is not
    for two threads at once.
    """

    identity: LaunchIdentity

    def _set_up(
        self, kernel: LoadedKernel, grid: int, attributes: list[driver.LaunchAttribute], *blocks: ctypes.Structure
    ) -> None:
        """`blocks`: all arguments of the kernel, `LaunchArguments` first."""
        self._kernel, self._attributes = kernel, (driver.LaunchAttribute * max(1, len(attributes)))(*attributes)
        launch_config = driver.LaunchConfig(
            grid=(grid, 1, 1),
            block=(NUM_THREADS, 1, 1),
            shared_bytes=kernel.config.shared_bytes,
            attributes=ctypes.cast(self._attributes, ctypes.POINTER(driver.LaunchAttribute)),
            num_attributes=len(attributes),
        )
        self._stream, self._captured = 0, False
        self._launch, self._function = driver.library().cuLaunchKernelEx, kernel.function
        self._take(launch_config, blocks)

    def _take(self, launch_config: driver.LaunchConfig, blocks: tuple[Any, ...]) -> None:
        """The call's arguments as ctypes takes them without a conversion."""
        self._blocks, self._packed, self._config = blocks, blocks[0], launch_config
        self._config_reference = ctypes.byref(launch_config)
        self._parameters = (ctypes.c_void_p * len(blocks))(*map(ctypes.addressof, blocks))

    def _twin(self) -> Self:
        """The same launch with argument blocks of its own, to be changed."""
        twin = object.__new__(type(self))
        twin._kernel, twin._attributes, twin.identity = self._kernel, self._attributes, self.identity
        twin._stream, twin._captured = self._stream, self._captured
        twin._launch, twin._function = self._launch, self._function
        twin._take(driver.LaunchConfig.from_buffer_copy(self._config), tuple(map(abi.aligned_copy, self._blocks)))
        return twin

    def run(self, stream: int, captured: bool = False) -> None:
        """Enqueue it on a stream of the kernel's device, which must be current; `captured`: into a graph.

        Raises: DriverError.
        """
        if captured != self._captured:
            self._captured = self._packed.is_captured = captured
        if stream != self._stream:
            self._stream = self._config.stream = stream
        code = self._launch(self._config_reference, self._function, self._parameters, None)
        if code:
            driver.check(f"cuLaunchKernelEx({self._kernel.config.name}, grid {self._config.grid[0]})", code)


class PreparedLaunch(Prepared):
    """A launch of one product. Raises: OperatorInputError, WorkspaceError."""

    def __init__(self, kernel: LoadedKernel, arguments: LaunchArguments) -> None:
        config, schedule, size = kernel.config, arguments.schedule, arguments.size
        _check_arguments(config, arguments)
        packed = abi.aligned_block(
            abi.KernelArguments if config.network == "none" else network_abi.NetworkLaunchArguments
        )
        packed.m, packed.n, packed.terms, packed.segments = size.m, size.n, len(arguments.terms), arguments.segments
        packed.raster_group, packed.lag, packed.pace_ns = schedule.raster_group, schedule.lag, schedule.pace_ns
        packed.bias, packed.scale, packed.adds = arguments.bias, arguments.scale, arguments.adds
        owners = size.world if config.operator == "gemm_reduce_scatter" else 1
        packed.segment_rows = size.m // (arguments.segments * owners)
        if config.reduces and not config.streams and schedule.lag < 1:
            raise OperatorInputError("an operator with peers needs a lag of at least one tile")
        _fill_maps(packed, config, arguments)
        _fill_peers(packed, config, arguments)
        self._common = identity.of_launch(config, packed)
        self._identify(packed, arguments.peers.outs_offset if arguments.peers else -1)
        if config.trace and arguments.trace is not None:
            group = arguments.peers.group if arguments.peers else ()
            arguments.trace.stamp(packed, f"{self.identity.text}, grid {schedule.grid}", group)
        self._set_up(kernel, schedule.grid, self._launch_attributes(config, arguments.peers), packed)

    @staticmethod
    def _launch_attributes(config: KernelConfig, peers: PeerTable | None) -> list[driver.LaunchAttribute]:
        """Blocks of a streaming kernel wait only for the same block of a peer, and those before it always end: not all
        need be resident at once. They wait for earlier work themselves. Source: docs/decisions/306-few-rows.md.
        """
        if config.streams:
            clusters = [driver.cluster_attribute(config.split)] if config.split > 1 else []
            return clusters if peers is not None and peers.share_device else [*clusters, driver.early_attribute()]
        return [driver.cooperative_attribute()] if config.reduces else []

    def _identify(self, packed: abi.KernelArguments, outs_offset: int) -> None:
        """`outs_offset`: as in the peer table."""
        self.identity = self._common if outs_offset < 0 else identity.with_result(self._common, outs_offset)
        packed.identity = self.identity.number

    def moved(self, addresses: tuple[int, ...], outs: tuple[int, ...] = (), outs_offset: int = -1) -> PreparedLaunch:
        """The same launch of operands that lie elsewhere, at the same strides; a fraction of preparing it anew.

        `addresses`: of all a, all weights, the result, and the bias if there is one, each a multiple of 16. `outs` and
        `outs_offset`: as in the peer table.
        """
        twin = self._twin()
        twin._common = self._common
        packed, base, terms = twin._packed, ctypes.addressof(twin._packed), self._packed.terms
        for i in range(terms):
            tensor_map.move(base + _A_OFFSET + i * abi.TENSOR_MAP_BYTES, addresses[i])
            tensor_map.move(base + _WEIGHT_OFFSET + i * abi.TENSOR_MAP_BYTES, addresses[terms + i])
        packed.out_address = addresses[2 * terms]
        if not self._kernel.config.streams:
            tensor_map.move(base + _OUT_OFFSET, addresses[2 * terms])
        for rank, address in enumerate(outs):
            tensor_map.move(base + _PEER_OUT_OFFSET + rank * abi.TENSOR_MAP_BYTES, address)
        twin._identify(packed, outs_offset)
        packed.bias = addresses[-1] if self._kernel.config.has_bias else 0
        return twin


def launch(kernel: LoadedKernel, arguments: LaunchArguments, stream: int) -> None:
    """Prepare and run once. Raises: OperatorInputError, WorkspaceError, DriverError."""
    PreparedLaunch(kernel, arguments).run(stream)
