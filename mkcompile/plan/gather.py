"""All-gather + GEMMs: moved by all blocks beside their products, or by the copy engine beside ours or a library's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from mkcompile.plan import fused_cost as cost
from mkcompile.plan.arrivals import EngineWork
from mkcompile.plan.fused_cost import Case
from mkcompile.plan.gemm_cost import Gemm, cublas_us
from mkcompile.plan.plan import Roles, Tile
from mkcompile.plan.site import Candidate, Site, plan_of
from mkcompile.plan.stream import Stream, stream_forms

GATHER_TILES = tuple(
    Tile(rows=rows, columns=columns)
    for rows, columns in (
        (128, 256), (128, 224), (128, 192), (128, 160), (128, 128), (64, 256), (64, 128), (64, 64),
    )
)  # fmt: skip
LIBRARY_CHUNKS = (1,)
# Blocks of the kernel that moves shards between nodes, and those of it that pass others' on (decision 322).
_MOVER_BLOCKS, _RELAY_BLOCKS = 4, 8
_PUSH_CHUNK_BYTES = 16 << 10  # an image
_GROUP_ROWS = 128
# Smaller chunks cost more than they bring forward. Source: benchmarks/results/2xh200/gather_sweep.jsonl.
_ENGINE_CHUNK_BYTES, _MOST_CHUNKS = 16 << 20, 8
# Tiles of 64 rows read operands that tiles of 128 share; tiles of 128 columns gain less than alone. Source: the same.
_HALF_TILE_FACTOR, _NARROW_FACTOR = 1.25, 1.02
# A k-block of 64 of the smallest tile. Source: benchmarks/results/2xh200/gather_small.jsonl.
_BLOCK_K, _BLOCK_US = 64, 0.4
# The library's products of a shard, over what is predicted of a whole one. Source: the same.
_LIBRARY_FACTOR = 0.95
# Host time of a call by the library, whose products are calls of torch: half of what one process took for two ranks.
_LIBRARY_HOST_US, _PRODUCT_HOST_US = 50.0, 60.0
# Up to so many gathered rows all of them go into one buffer, so that the weights are read once.
_TOGETHER_ROWS = 512
# What products lose while blocks move rows, of that time. Source: the same: pushes over copy engine, N of 7168.
_BESIDE_MOVING = 0.25
# Of a tile, what is left to do when the last rows have come. Source: the same.
_ARRIVAL_TILES = 0.15
# Streaming forms that no gather has been measured with.
_UNTRIED = ((128, 128, 4),)
# Moving costs more where the gathered tensor is a result, too, and beside several weights; less where a block has room
# for one image beside its tile. Source: the same.
_RETURNED, _SEVERAL_WEIGHTS, _ONE_IMAGE = 1.2, 1.2, 1.08
_WIDE_COLUMNS = (192, 256)
# Images that have a time each, of NVLink; from the start to the peers' first products, from the last image to the last
# product; what products lose meanwhile, and to the exchange of two blocks' sums. Source: the same, gather_paces.jsonl.
_PACED_FRACTION, _PACED_FIRST_US, _PACED_ARRIVAL_US, _BESIDE_PACED, _SHARED_US = 0.607, 7.0, 11.0, 0.15, 2.5
SHARED_TILES = (Tile(rows=128, columns=128), Tile(rows=128, columns=160))
_PAIRED_BLOCKS, _GPCS = 128, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """One problem's sizes, with the grid that a launch may have."""

    site: Site

    @property
    def most_blocks(self) -> int:
        """Blocks of the largest launch."""
        return self.site.topology.gpu.num_sms - self.site.reserve_sms

    @property
    def shard_rows(self) -> int:
        """Rows of one rank's shard."""
        one = self.site.problem
        return one.m if one.dim == "columns" else one.m // one.world_size

    @property
    def shard_bytes(self) -> int:
        """Bytes that each rank sends to each other."""
        one = self.site.problem
        return one.m * one.k * one.dtype_bytes // one.world_size

    @property
    def together(self) -> bool:
        """Do all gathered rows lie in one buffer?"""
        one = self.site.problem
        return one.dim == "rows" and one.outer == 1 and one.m <= _TOGETHER_ROWS

    def tiles(self, tile: Tile) -> int:
        """Tiles of all products; where shards lie apart each is cut up by itself."""
        one = self.site.problem
        columns = one.num_gemms * ceil(one.n / one.num_gemms / tile.columns)
        if one.dim == "rows" and self.together:
            return ceil(one.m / tile.rows) * columns
        return self.row_tiles(tile) * (1 if one.dim == "columns" else one.world_size) * columns

    def row_tiles(self, tile: Tile) -> int:
        """Of one shard by itself."""
        segments = 1 if self.site.problem.dim == "columns" else max(1, self.site.problem.outer)
        return ceil(self.shard_rows / segments / tile.rows) * segments

    def tile_us(self, case: Case) -> float:
        """One tile, with its start."""
        half = case.tile.rows == 64 and not self.together
        factor = _HALF_TILE_FACTOR if half else _NARROW_FACTOR if case.tile.columns == 128 else 1.0
        least_us = ceil(case.gemm.k / _BLOCK_K) * _BLOCK_US
        known = case.machine.constants
        one = case.compute().tile_us * factor * known.gather_gemm_factor / known.own_gemm_factor
        return max(one, least_us) + known.tile_start_us

    def push(self, tile: Tile) -> Candidate:
        """All blocks push beside their products; tiles begin with the first k-blocks that come."""
        site, constants = self.site, self.site.machine.constants
        if not self.together and not site.problem.returns_gathered:
            return self._paced(tile, 1)
        case = site.case(site.gemm(), tile, positions=self.tiles(tile))
        crossing = self.shard_bytes * (site.span.per_node - (0 if self.together else 1))
        moving = case.machine.link_us(crossing, constants.gather_push_fraction)
        moving *= _RETURNED if site.problem.returns_gathered else 1.0
        moving *= _SEVERAL_WEIGHTS if site.problem.num_gemms > 1 else 1.0
        moving /= _ONE_IMAGE if tile.columns in _WIDE_COLUMNS else 1.0
        us = self._beside_moving(case, moving, constants.flag_us)
        plan = plan_of(site, case, "push", transport="store", chunk_bytes=_PUSH_CHUNK_BYTES)
        return Candidate(plan=plan, seconds=us * 1e-6)

    def shared(self, tile: Tile) -> Candidate | None:
        """The same, two blocks a tile: for no rows that are returned, with which it was never timed."""
        one = self.site.problem
        possible = not one.returns_gathered and one.k >= 2 * tile.depth and self._at_once(2) > 0
        return self._paced(tile, 2) if possible else None

    def _at_once(self, split: int) -> int:
        """Tiles that are multiplied at once. As the runtime's `resident_grid`."""
        blocks = self.most_blocks
        if split > 1 and blocks < _PAIRED_BLOCKS:
            blocks = max(2, blocks - _GPCS)
        return blocks // split

    def _paced(self, tile: Tile, split: int) -> Candidate:
        """Each image has its time on the link. As the runtime's `_paced_choice`."""
        site, constants, one = self.site, self.site.machine.constants, self.site.problem
        at_once, row_tiles = self._at_once(split), self.row_tiles(tile)
        tiles = row_tiles * (1 if one.dim == "columns" else one.world_size)
        tiles *= one.num_gemms * ceil(one.n / one.num_gemms / tile.columns)
        case = site.case(site.gemm(), tile, positions=tiles)
        moved_bytes = row_tiles * tile.rows * one.k * one.dtype_bytes * (site.span.per_node - 1)
        moving = case.machine.link_us(moved_bytes, _PACED_FRACTION)
        waves = ceil(tiles / at_once)
        tile_us = self.tile_us(case) / split + (_SHARED_US if split > 1 else 0.0)
        busy = waves * tile_us + (_PACED_FIRST_US if waves == 1 else 0.0)
        busy += _BESIDE_PACED * min(busy, moving)
        us = constants.gemm_launch_us + max(busy, moving + _PACED_ARRIVAL_US + _ARRIVAL_TILES * tile_us)
        plan = plan_of(site, case, "push", transport="store", chunk_bytes=_PUSH_CHUNK_BYTES)
        roles = Roles(compute=at_once * split, reserve=site.topology.gpu.num_sms - at_once * split)
        return Candidate(plan=replace(plan, split=split, roles=roles), seconds=us * 1e-6)

    def streams(self) -> Iterator[Candidate]:
        """Few rows are copied to all ranks, then the weights are streamed. No rows are returned.

        A block waits for what all blocks of a peer copy, so all are to be resident: as the runtime's `stream_choice`.
        """
        site, constants, one = self.site, self.site.machine.constants, self.site.problem
        if not self.together or one.returns_gathered:
            return
        copied = site.machine.link_us(self.shard_bytes * (site.span.per_node - 1), constants.gather_copy_fraction)
        for tile, split in gather_stream_forms():
            stream = Stream(site=site, tile=tile, split=split, resident=True)
            if not stream.possible():
                continue
            roles = Roles(compute=stream.blocks, reserve=site.topology.gpu.num_sms - stream.blocks)
            case = replace(site.case(site.gemm(), tile), roles=roles)
            plan = replace(plan_of(site, case, "stream", transport="store"), split=split)
            us = stream.product_us() + constants.gather_copy_us + copied
            yield Candidate(plan=plan, seconds=us * 1e-6)

    def remote_read(self, tile: Tile) -> Candidate:
        """Shards are copied to where peers reach them, and read there once for every column of tiles."""
        site, constants = self.site, self.site.machine.constants
        case = site.case(site.gemm(), tile, positions=self.tiles(tile))
        columns = site.problem.num_gemms * ceil(site.problem.n / site.problem.num_gemms / tile.columns)
        crossing = self.shard_bytes * (site.span.per_node - 1) * columns
        moving = case.machine.link_us(crossing, constants.remote_read_fraction)
        us = self._beside_moving(case, moving, 2 * constants.flag_us)
        plan = plan_of(site, case, "remote_read", transport="load", chunk_bytes=_PUSH_CHUNK_BYTES)
        return Candidate(plan=plan, seconds=us * 1e-6)

    def _beside_moving(self, case: Case, moving_us: float, flag_us: float) -> float:
        constants = case.machine.constants
        busy = ceil(self.tiles(case.tile) / self.most_blocks) * self.tile_us(case)
        busy += _BESIDE_MOVING * min(busy, moving_us)
        arrival = moving_us + flag_us + constants.gather_arrival_us + _ARRIVAL_TILES * self.tile_us(case)
        return constants.gemm_launch_us + cost.smooth_max(busy, arrival, constants)

    def across(self, tile: Tile) -> Candidate:
        """Over nodes, moved by a kernel on SMs of its own: one tile is left to do when the last rows have come."""
        site, constants, one = self.site, self.site.machine.constants, self.site.problem
        relays = _RELAY_BLOCKS if site.span.per_node > 1 or one.returns_gathered else 0
        case = site.case(site.gemm(), tile, intra=_MOVER_BLOCKS + relays, positions=self.tiles(tile))
        gathered = one.world_size * self.shard_bytes
        inside = case.machine.link_us(gathered * (1 - 1 / site.span.per_node), constants.push_fraction)
        moving = cost.links_us(inside, case.network_us("all_gather", gathered), constants)
        waves = ceil(self.tiles(tile) / (self.most_blocks - case.roles.intra))
        busy = waves * self.tile_us(case)
        busy += constants.push_interference * min(busy, moving)
        arrival = moving + constants.flag_us + constants.gather_arrival_us + self.tile_us(case)
        us = constants.gemm_launch_us + cost.smooth_max(busy, arrival, constants)
        plan = plan_of(site, case, "push", transport="store", chunk_bytes=_PUSH_CHUNK_BYTES)
        return Candidate(plan=plan, seconds=us * 1e-6)

    def engine(self, tile: Tile) -> Candidate:
        """The copy engine pushes, in as many chunks as end soonest."""
        site, tiles, constants = self.site, self.tiles(tile), self.site.machine.constants
        case = site.case(site.gemm(), tile, positions=tiles)
        most = max(1, min(_MOST_CHUNKS, self.shard_bytes // _ENGINE_CHUNK_BYTES, self.shard_rows // _GROUP_ROWS))
        peers = site.span.per_node - 1
        busy = ceil(tiles / self.most_blocks) * self.tile_us(case)
        work = EngineWork(
            positions=tiles, own=0 if site.problem.dim == "columns" else tiles // site.problem.world_size,
            grid=self.most_blocks, tile_us=self.tile_us(case) * self._beside_engine(busy) / busy,
            sent_us=site.machine.link_us(self.shard_bytes * peers, constants.copy_engine_fraction),
            start_us=constants.copy_engine_first_byte_us, chunk_us=peers * constants.copy_engine_chunk_us,
        )  # fmt: skip
        us, chunks, _ = work.best(most)
        us += constants.gemm_launch_us + constants.gather_gate_us
        plan = plan_of(site, case, "copy_engine", transport="copy_engine", chunk_bytes=ceil(self.shard_bytes / chunks))
        return Candidate(plan=plan, seconds=us * 1e-6)

    def _beside_engine(self, busy_us: float) -> float:
        """What products take, slowed down while the copy engine works."""
        return busy_us + self.site.machine.constants.copy_engine_interference * min(busy_us, self._engine_us(1))

    def _engine_us(self, chunks: int) -> float:
        constants, machine = self.site.machine.constants, self.site.machine
        peers = self.site.span.per_node - 1
        link = machine.link_us(self.shard_bytes * peers, constants.copy_engine_fraction)
        return constants.copy_engine_first_byte_us + chunks * peers * constants.copy_engine_chunk_us + link

    def library(self, chunks: int) -> Candidate:
        """The copy engine pushes, and the library multiplies: own rows, then each chunk that has come."""
        site, constants = self.site, self.site.machine.constants
        case = site.case(site.gemm(), GATHER_TILES[0])
        one, peers = site.problem, site.span.per_node - 1
        rows = [self.shard_rows] + [ceil(self.shard_rows / chunks)] * chunks * peers
        columns = ceil(one.n / one.num_gemms)
        products = [
            one.num_gemms
            * cublas_us(Gemm(m=m, n=columns, k=one.k, dtype_bytes=one.dtype_bytes), site.topology.gpu, constants)
            for m in rows
        ]
        busy = self._beside_engine(_LIBRARY_FACTOR * sum(products))
        us = cost.smooth_max(busy, self._engine_us(chunks) + products[-1], constants)
        us += constants.gather_gate_us * len(rows) * one.num_gemms
        us = max(us, _LIBRARY_HOST_US + _PRODUCT_HOST_US * len(rows) * one.num_gemms)
        plan = plan_of(site, case, "library", transport="copy_engine", chunk_bytes=ceil(self.shard_bytes / chunks))
        return Candidate(plan=plan, seconds=us * 1e-6)


def gather_stream_forms() -> Iterator[tuple[Tile, int]]:
    """All tiles for few gathered rows, each with the numbers of blocks that may share it."""
    return ((tile, split) for tile, split in stream_forms() if (tile.rows, tile.columns, split) not in _UNTRIED)


def gather_candidates(site: Site) -> Iterator[Candidate]:
    """Every tile and every way, larger tiles first."""
    gather = Gather(site=site)
    if site.span.num_nodes > 1:
        yield from (gather.across(tile) for tile in GATHER_TILES)
        return
    one = site.problem
    for tile in GATHER_TILES:
        yield gather.push(tile)
        shared = gather.shared(tile) if tile in SHARED_TILES else None
        if shared is not None:
            yield shared
        yield gather.engine(tile)
        if not one.returns_gathered:
            yield gather.remote_read(tile)
    yield from gather.streams()
    if not one.returns_gathered and one.dim == "rows" and one.outer == 1:
        for chunks in LIBRARY_CHUNKS:
            yield gather.library(chunks)
