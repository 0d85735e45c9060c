"""One launch of an all-gather kernel: what it is given, and the argument blocks that the driver takes.

Shapes: a shard is [segments, segment_rows, k] on each rank, or for columns [rows, k]. The gathered matrix is [segments,
world, segment_rows, k], or [rows, world, k]; its rows are those of every product.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from math import ceil

from mkcompile.errors import OperatorInputError, WorkspaceError
from mkcompile.runtime import abi, driver, gather_abi, tensor_map
from mkcompile.runtime.gather_abi import APART, BLOCKS_PULL, BLOCKS_PUSH, COLUMNS, ENGINE_COPIES, PEERS_READ, TOGETHER
from mkcompile.runtime.identity import LaunchIdentity
from mkcompile.runtime.kernel import LoadedKernel, PeerTable, Prepared, fill_workspaces, map_of_weight
from mkcompile.runtime.kernel_config import BLOCK_K, KernelConfig
from mkcompile.runtime.recorder import Recorder
from mkcompile.runtime.tensor_map import Matrix
from mkcompile.runtime.workspace_layout import WorkspaceLayout

ELEMENT_BYTES = 2
_A_OFFSET, _WEIGHT_OFFSET = abi.KernelArguments.a.offset, abi.KernelArguments.weight.offset


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherSize:
    """Sizes of one all-gather and its products. `k` and `segment_rows` are one rank's; `n` the columns of each weight.

    `columns`: shards are columns of the gathered matrix, not rows.
    """

    segment_rows: int
    k: int
    n: tuple[int, ...]
    world: int
    segments: int = 1
    columns: bool = False

    @property
    def shard_rows(self) -> int:
        """Rows of one rank's shard."""
        return self.segments * self.segment_rows

    @property
    def rows(self) -> int:
        """Rows of the gathered matrix."""
        return self.shard_rows * (1 if self.columns else self.world)

    @property
    def inner(self) -> int:
        """The summed dimension."""
        return self.k * (self.world if self.columns else 1)

    @property
    def shard_bytes(self) -> int:
        """Bytes that each rank sends to each other."""
        return self.shard_rows * self.k * ELEMENT_BYTES

    def tiles_n(self, config: KernelConfig) -> int:
        """Column tiles of all products."""
        return sum(ceil(n / config.block_n) for n in self.n)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherSchedule:
    """What one launch does when.

    Units: `grid` blocks. `mover` and `order`: a `GatherMover` and a `GatherOrder` of the device. `image_rows` rows of
    an image, as many as the tile has; images of `band` row tiles are sent together, k-block by k-block. The copy engine
    moves `group_rows` rows of a shard at once, in `slices` of k. A streaming kernel copies a shard in so many `parts`,
    to where all rows lie as a matrix. `pace_ns`: time between two images that a rank's blocks push, `fenced` of which
    one fence publishes; 0: as many at once as there is room for.
    """

    grid: int
    mover: int = BLOCKS_PUSH
    order: int = APART
    image_rows: int = 128
    band: int = 8
    group_rows: int = 128
    raster_group: int = 8
    parts: int = 0
    pace_ns: int = 0
    slices: int = 1
    fenced: int = 1

    def __post_init__(self) -> None:
        if min(self.grid, self.group_rows, self.raster_group, self.band, self.image_rows) < 1:
            raise ValueError(f"not a schedule: {self}")
        if self.parts < 0 or (self.parts and (self.order, self.mover) != (TOGETHER, BLOCKS_PUSH)):
            raise ValueError(f"not a schedule: {self}")
        if self.pace_ns < 0 or (self.pace_ns and (self.mover != BLOCKS_PUSH or self.parts)):
            raise ValueError(f"not a schedule: {self}")
        if self.fenced < 1 or (self.fenced > 1 and not self.pace_ns):
            raise ValueError(f"not a schedule: {self}")
        if self.slices < 1 or (self.slices > 1 and self.mover != ENGINE_COPIES):
            raise ValueError(f"not a schedule: {self}")
        movers = ENGINE_COPIES, BLOCKS_PUSH, PEERS_READ, BLOCKS_PULL
        if self.order not in (APART, TOGETHER, COLUMNS) or self.mover not in movers:
            raise ValueError(f"not a schedule: {self}")

    @property
    def by_engine(self) -> bool:
        """Whether the copy engine moves the rows, into an area of its own."""
        return self.mover == ENGINE_COPIES

    def images(self, size: GatherSize) -> int:
        """Images of one rank's shard; where rows lie together, of all of them."""
        if self.order == APART:
            row_tiles = ceil(size.segment_rows / self.image_rows) * size.segments
        else:
            row_tiles = ceil(size.rows / self.image_rows)
        return row_tiles * ceil(size.k / BLOCK_K)

    def flags(self, size: GatherSize) -> int:
        """Flag words for each source."""
        if self.parts:
            return self.parts
        return ceil(size.shard_rows / self.group_rows) * self.slices if self.by_engine else self.images(size)

    def arena_bytes(self, size: GatherSize) -> int:
        """Bytes that hold what others send, or read, in one rank's memory."""
        if self.by_engine:
            return size.shard_bytes * (size.world - 1)
        if self.parts:
            return size.shard_bytes * size.world
        copies = 1 if self.order == TOGETHER or self.mover == PEERS_READ else size.world - 1
        copies += self.mover == BLOCKS_PULL  # what lies ready for the peers
        return self.images(size) * copies * self.image_rows * BLOCK_K * ELEMENT_BYTES

    def positions(self, config: KernelConfig, size: GatherSize) -> int:
        """Tiles of the launch."""
        if self.order == APART:
            row_tiles = ceil(size.segment_rows / config.block_m) * size.segments * size.world
        else:
            row_tiles = ceil(size.rows / config.block_m)
        return row_tiles * size.tiles_n(config)

    def check(self, size: GatherSize, layout: WorkspaceLayout) -> None:
        """Raises: WorkspaceError where the workspace is too small."""
        if self.flags(size) > layout.max_tiles:
            raise WorkspaceError(f"{self.flags(size)} flags a rank; this workspace has {layout.max_tiles}")
        if not self.by_engine and self.arena_bytes(size) > layout.region_bytes:
            raise WorkspaceError(
                f"gathered rows of {self.arena_bytes(size)} bytes do not fit in a region of {layout.region_bytes} "
                f"bytes; raise MKCOMPILE_ARENA_BYTES"
            )


def slice_blocks(k: int, slices: int) -> int:
    """K-blocks of each slice but the last. Source: Images::slice_blocks in csrc/device/gather_image.cuh."""
    return ceil(ceil(k / BLOCK_K) / slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherLaunch:
    """One launch. `shard` is this rank's, in one piece; `weights[i]`, `outs[i]` and `biases[i]` (0: none) belong
    together; `result` is the address of the gathered tensor, or 0 where it is not wanted; `landing` is where the copy
    engine writes what comes to this rank (0: blocks push, into the workspace).
    """

    shard: Matrix
    weights: tuple[Matrix, ...]
    outs: tuple[Matrix, ...]
    biases: tuple[int, ...]
    size: GatherSize
    schedule: GatherSchedule
    peers: PeerTable
    result: int = 0
    landing: int = 0
    trace: Recorder | None = None


def check_operands(config: KernelConfig, launch: GatherLaunch) -> None:
    """On one node or several. Raises: OperatorInputError."""
    size, shard, ranks = launch.size, launch.shard, launch.peers.layout.ranks
    if not 1 <= len(launch.weights) <= gather_abi.MAX_WEIGHTS:
        raise OperatorInputError(f"{len(launch.weights)} products; one launch has 1 to {gather_abi.MAX_WEIGHTS}")
    if not len(launch.weights) == len(launch.outs) == len(launch.biases) == len(size.n):
        raise OperatorInputError("one result, one bias (or 0) and one n for each weight")
    if (shard.rows, shard.columns, shard.stride) != (size.shard_rows, size.k, size.k):
        raise OperatorInputError(f"the shard must be {size.shard_rows}x{size.k} in one piece, got {shard}")
    if size.k % (BLOCK_K if size.columns else 8) or size.k < 8 or size.shard_rows < 1:
        raise OperatorInputError(f"k must be a multiple of {BLOCK_K if size.columns else 8}, got {size.k}")
    for weight, out, n in zip(launch.weights, launch.outs, size.n, strict=True):
        expected = (n, size.inner) if config.weight_layout == "nk" else (size.inner, n)
        if (weight.rows, weight.columns) != expected or (out.rows, out.columns) != (size.rows, n) or n % 8 or n < 8:
            raise OperatorInputError(f"weight {weight}, result {out}, n {n}; n must be a multiple of 8")
    if any(launch.biases) and not config.has_bias:
        raise OperatorInputError("the kernel adds no bias")
    if ranks != size.world:
        raise OperatorInputError(f"{size.world} ranks, a workspace of {ranks}")


def _check(config: KernelConfig, launch: GatherLaunch) -> None:
    size, schedule = launch.size, launch.schedule
    if config.operator != "all_gather_gemm" or config.network != "none" or launch.peers.network is not None:
        raise OperatorInputError(f"{config.name} does not gather on one node")
    check_operands(config, launch)
    if size.columns != (schedule.order == COLUMNS) or (size.segments > 1 and schedule.order != APART):
        raise OperatorInputError(f"order {schedule.order} for {size}")
    if schedule.mover != BLOCKS_PUSH and schedule.order == TOGETHER:
        raise OperatorInputError("rows that lie together are pushed by blocks")
    if schedule.mover in (PEERS_READ, BLOCKS_PULL) and launch.result:
        raise OperatorInputError("rows that peers read in place are not returned")
    if (schedule.mover == BLOCKS_PULL) != config.pulls:
        raise OperatorInputError(f"mover {schedule.mover} by {config.name}")
    if (launch.result != 0) != config.returns and not config.streams:
        raise OperatorInputError(f"{config.name} and rows that are {'' if launch.result else 'not '}returned")
    if bool(schedule.parts) != config.streams:
        raise OperatorInputError(f"{config.name} and {schedule.parts} parts")
    if schedule.parts and launch.result:
        raise OperatorInputError("a streaming gather returns no rows")
    if schedule.grid % config.split or ceil(size.k / BLOCK_K) < config.split:
        raise OperatorInputError(f"k {size.k} for clusters of {config.split} in a grid of {schedule.grid}")
    if schedule.image_rows != config.block_m and not schedule.by_engine:
        raise OperatorInputError(f"images of {schedule.image_rows} rows for tiles of {config.block_m}")
    if schedule.slices > 1 and (schedule.slices - 1) * slice_blocks(size.k, schedule.slices) * BLOCK_K >= size.k:
        raise OperatorInputError(f"k {size.k} in {schedule.slices} slices")
    if (launch.landing != 0) != schedule.by_engine:
        raise OperatorInputError("the copy engine, and only it, needs an area of its own")
    schedule.check(size, launch.peers.layout)


def fill_maps(packed: abi.KernelArguments, gather: gather_abi.GatherArguments, config: KernelConfig,
               launch: GatherLaunch) -> None:  # fmt: skip
    """The tensor maps of operands and results."""
    if config.streams:
        _fill_stream_maps(packed, gather, config, launch)
        return
    size, schedule = launch.size, launch.schedule
    box_a = (BLOCK_K, config.block_m)
    shard_map = tensor_map.encode(launch.shard.pointer, config.dtype, (size.k, size.shard_rows), (size.k,), box_a, 128)
    ctypes.memmove(packed.a[0], shard_map, len(shard_map))
    if launch.landing:
        came = (size.k, size.shard_rows * (size.world - 1))
        landing_map = tensor_map.encode(launch.landing, config.dtype, came, (size.k,), box_a, 128)
        for parity in range(2):
            ctypes.memmove(gather.arena[parity], landing_map, len(landing_map))
    run_rows = size.segment_rows if schedule.order == APART else size.rows
    if launch.result:
        runs = (size.k, size.rows, size.world) if size.columns else (size.k, run_rows, size.rows // run_rows)
        strides = (size.k * size.world, size.k) if size.columns else (size.k, size.k * run_rows)
        gathered_map = tensor_map.encode(launch.result, config.dtype, runs, strides, (*box_a, 1), 128)
        ctypes.memmove(gather.gathered, gathered_map, len(gathered_map))
    for i, (weight, out) in enumerate(zip(launch.weights, launch.outs, strict=True)):
        weight_map = map_of_weight(config, weight)
        ctypes.memmove(packed.weight[i], weight_map, len(weight_map))
        out_map = tensor_map.encode(
            out.pointer, config.dtype, (out.columns, run_rows, size.rows // run_rows),
            (out.stride, out.stride * run_rows), (config.panel_n, 64, 1), config.panel_n * 2,
        )  # fmt: skip
        ctypes.memmove(gather.out[i], out_map, len(out_map))


def _fill_stream_maps(packed: abi.KernelArguments, gather: gather_abi.GatherArguments, config: KernelConfig,
                      launch: GatherLaunch) -> None:  # fmt: skip
    """The rows of all ranks in the workspace, of which none is loaded that is not there; weights; results."""
    size, layout = launch.size, launch.peers.layout
    box = (BLOCK_K, min(config.block_m, ceil(size.rows / 8) * 8))
    for parity in range(2):
        region = launch.peers.workspaces[launch.peers.rank] + layout.region_offset + parity * layout.region_bytes
        rows_map = tensor_map.encode(region, config.dtype, (size.k, size.rows), (size.k,), box, 128)
        ctypes.memmove(gather.arena[parity], rows_map, len(rows_map))
    for i, (weight, out) in enumerate(zip(launch.weights, launch.outs, strict=True)):
        weight_map = map_of_weight(config, weight)
        ctypes.memmove(packed.weight[i], weight_map, len(weight_map))
        gather.out_address[i], gather.out_stride[i] = out.pointer, out.stride
    packed.n = size.tiles_n(config) * config.block_n  # every product begins with a tile of its own


def fill_words(packed: abi.KernelArguments, gather: gather_abi.GatherArguments, launch: GatherLaunch) -> None:
    """All else that is not an identity."""
    size, schedule = launch.size, launch.schedule
    packed.m, packed.k[0], packed.terms, packed.scale = size.rows, size.k, 1, 1.0
    packed.segments, packed.segment_rows = size.segments, size.segment_rows
    packed.raster_group, packed.pace_ns = schedule.raster_group, schedule.pace_ns
    fill_workspaces(packed, launch.peers)
    gather.shard, gather.result, gather.landing = launch.shard.pointer, launch.result, launch.landing
    gather.weights = len(launch.weights)
    for i, (n, bias) in enumerate(zip(size.n, launch.biases, strict=True)):
        gather.n[i], gather.bias[i] = n, bias
    gather.order, gather.pushes, gather.band = schedule.order, schedule.mover, schedule.band
    gather.parts, gather.group_rows = schedule.parts or max(schedule.slices, schedule.fenced), schedule.group_rows


def argument_words(
    launch: GatherLaunch, kernel: str
) -> tuple[abi.KernelArguments, gather_abi.GatherArguments, LaunchIdentity]:
    """Argument blocks without tensor maps, and what the launch is: all that its ranks must share, in `kernel` too."""
    packed, gather = abi.aligned_block(abi.KernelArguments), abi.aligned_block(gather_abi.GatherArguments)
    fill_words(packed, gather, launch)
    size, schedule = launch.size, launch.schedule
    # A block fetches what the same block of a peer has laid ready; every part is waited for.
    moved = f", {schedule.grid} blocks" if schedule.mover == BLOCKS_PULL else ""
    moved += f", {schedule.parts} parts" if schedule.parts else ""
    moved += f", {schedule.slices} slices" if schedule.slices > 1 else ""
    identity = LaunchIdentity.of(
        f"all_gather_gemm {size.rows}x{'+'.join(map(str, size.n))}x{size.inner}, {size.segments} segments, "
        f"{'columns' if size.columns else 'rows'} on {size.world} ranks, {kernel}, order {schedule.order}, "
        f"mover {schedule.mover}, {schedule.group_rows} rows{moved}"
    )
    packed.identity = identity.number
    return packed, gather, identity


def _launch_attributes(config: KernelConfig, share_device: bool) -> list[driver.LaunchAttribute]:
    """All blocks are resident, since each moves rows that others wait for. Of a streaming kernel only the first blocks
    do, which wait for nobody; its blocks wait for earlier work themselves. Source: docs/decisions/307-all-gather.md.
    """
    resident = not config.streams or share_device
    first = driver.cooperative_attribute() if resident else driver.early_attribute()
    return [first, *([driver.cluster_attribute(config.split)] if config.split > 1 else [])]


class PreparedGather(Prepared):
    """A launch of gathered rows. Raises: OperatorInputError, WorkspaceError."""

    def __init__(self, kernel: LoadedKernel, launch: GatherLaunch) -> None:
        _check(kernel.config, launch)
        name = kernel.config.name.removesuffix("_trace").removeprefix("all_gather_gemm_")
        packed, gather, self.identity = argument_words(launch, name)
        fill_maps(packed, gather, kernel.config, launch)
        if kernel.config.trace and launch.trace is not None:
            launch.trace.stamp(packed, f"{self.identity.text}, grid {launch.schedule.grid}", launch.peers.group)
        attributes = _launch_attributes(kernel.config, launch.peers.share_device)
        self._set_up(kernel, launch.schedule.grid, attributes, packed, gather)

    def moved(self, shard: int, weights: tuple[int, ...], outs: tuple[int, ...], biases: tuple[int, ...],
              result: int) -> PreparedGather:  # fmt: skip
        """The same launch of operands that lie elsewhere, at the same strides, at multiples of 16."""
        twin = self._twin()
        words, rows = twin.arguments
        packed, gather = ctypes.addressof(words), ctypes.addressof(rows)
        rows.shard, rows.result = shard, result
        if self._kernel.config.streams:
            for i, (weight, out) in enumerate(zip(weights, outs, strict=True)):
                tensor_map.move(packed + _WEIGHT_OFFSET + i * abi.TENSOR_MAP_BYTES, weight)
                rows.out_address[i], rows.bias[i] = out, biases[i]
            return twin
        tensor_map.move(packed + _A_OFFSET, shard)
        for i, (weight, out) in enumerate(zip(weights, outs, strict=True)):
            tensor_map.move(packed + _WEIGHT_OFFSET + i * abi.TENSOR_MAP_BYTES, weight)
            tensor_map.move(gather + gather_abi.OUT_OFFSET + i * abi.TENSOR_MAP_BYTES, out)
            rows.bias[i] = biases[i]
        if result:
            tensor_map.move(gather + gather_abi.GATHERED_OFFSET, result)
        return twin

    @property
    def arguments(self) -> tuple[abi.KernelArguments, gather_abi.GatherArguments]:
        """The argument blocks, for the kernels round the copy engine's transfers."""
        packed, gather = self._blocks
        return packed, gather
