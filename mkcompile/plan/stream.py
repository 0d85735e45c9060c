"""Kernels for few rows: whole tiles go to all peers at once, and the blocks of a cluster may share a tile's k."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from typing import Literal

from mkcompile.plan.gemm_cost import tile_us
from mkcompile.plan.plan import Roles, Tile
from mkcompile.plan.site import Candidate, Site, plan_of

# Tiles of 32 columns were never fastest (decision 306).
STREAM_TILES = tuple(Tile(rows=rows, columns=columns) for rows, columns in ((128, 128), (128, 64), (64, 128), (64, 64)))
SPLITS = (1, 2, 4)
_MATH_GROUP_ROWS, _UNIT_COLUMNS = 64, 8
# Nothing was measured beyond.
_MOST_ROWS = 1024
# Two epochs of every tile from every peer: what the runtime's workspace has room for.
_MAILBOX_BYTES = 32 << 20
# Clusters do not reach over the edge of the smallest corner of the chip; the few SMs beyond are of no use. Of clusters
# of four a sixteenth fewer fit: 30 of 132 SMs (decision 306).
_CORNER_SMS = 16
_CORNERS_FOR_4 = 15 / 16
# Whole tiles whose partials others send while the next is multiplied, and tiles whose math groups take turns, by
# split (decision 306). A plan's transport names the way.
_HANDED_OVER = ((128, 128), (128, 64), (64, 128), (64, 64))
_IN_TURNS = ((128, 128, 1), (128, 128, 2), (64, 128, 1))
_SCATTERED_IN_TURNS = (128, 64, 2)
_TURNS_OVER_LINK = 0.75
# A cluster shares only its first and last tile where a whole tile's products take this much longer than the link needs
# for a wave of them: a group has no more time for what it sends (decision 306).
_ENDS_SHARED = (128, 128, 2)
_ENDS_OVER_LINK = 1.2
# Of a weight that a cache keeps between the rows of one owner and the next.
_CACHED_BYTES = 24 << 20
Way = Literal["together", "turns", "handed", "ends"]
# Elements of the tile that `cluster_us` is stated for.
_EXCHANGED = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One way to launch: `tiles` in `waves` on clusters of `split` blocks. `how`: the groups' way; None: the best.
    `resident`: all blocks must run at once, so those SMs don't count that are left to other kernels.
    """

    site: Site
    tile: Tile
    split: int
    how: Way | None = None
    resident: bool = False

    @property
    def tiles(self) -> int:
        """Tiles of the product."""
        gemm = self.site.gemm()
        return ceil(gemm.m / self.tile.rows) * ceil(gemm.n / self.tile.columns)

    @property
    def waves(self) -> int:
        """Tiles that a cluster takes one after the other. A reduction leaves no SM to others: its blocks wait only for
        a peer's same block, so the launch need not be resident as a whole (decision 306).
        """
        sms = max(1, self.site.topology.gpu.num_sms - (self.site.reserve_sms if self.resident else 0))
        if self.split == 1 or sms < _CORNER_SMS:
            return ceil(self.tiles / max(1, sms // self.split))
        usable = sms // _CORNER_SMS * _CORNER_SMS
        return ceil(self.tiles / (int(usable * (_CORNERS_FOR_4 if self.split == 4 else 1)) // self.split))

    @property
    def way(self) -> Way:
        """What the math groups of a block with several tiles do."""
        if self.how is not None or self.waves == 1:
            return self.how or "together"
        rows, columns = self.tile.rows, self.tile.columns
        if self._shares_ends():
            return "ends"
        if (rows, columns, self.split) == _SCATTERED_IN_TURNS:
            return "turns" if self.site.problem.operator == "gemm_reduce_scatter" else "together"
        long = self.split > 1 or self.waves == 2 or self._products_over_link() > _TURNS_OVER_LINK
        if long and (rows, columns, self.split) in _IN_TURNS:
            return "turns"
        return "handed" if self.split == 1 and (rows, columns) in _HANDED_OVER else "together"

    def _products_over_link(self) -> float:
        """Time of a whole tile's products over that of the partials of all blocks' tiles on the link."""
        gemm, machine, tile = self.site.gemm(), self.site.machine, self.tile
        sent = self.blocks * tile.rows * tile.columns * gemm.dtype_bytes * (self.site.problem.world_size - 1)
        products = tile_us(tile.rows, tile.columns, gemm, machine.topology.gpu, machine.constants)
        return products / machine.link_us(sent, 0.8)

    def _shares_ends(self) -> bool:
        """Do the blocks of a cluster share only its first and its last tile, and take turns with whole ones between?"""
        form = (self.tile.rows, self.tile.columns, self.split)
        reduces = self.site.problem.operator == "gemm_all_reduce"
        return reduces and form == _ENDS_SHARED and self.waves > 2 and self._products_over_link() > _ENDS_OVER_LINK

    @property
    def blocks(self) -> int:
        """Blocks of the launch."""
        return ceil(self.tiles / self.waves) * self.split

    def possible(self) -> bool:
        """Can the blocks of a cluster share such a tile, and do all tiles fit into the mailboxes?"""
        tile, peers = self.tile, self.site.problem.world_size - 1
        if self.site.gemm().m > _MOST_ROWS:
            return False
        if not _can_share(tile, self.split) or self.site.gemm().k < tile.depth * self.split:
            return False
        # Measured (decision 306): shared tiles want all rows. Of several that a cluster has, two can be worth it.
        all_rows = min(self.site.gemm().m, 2 * _MATH_GROUP_ROWS)
        known = (tile.rows, tile.columns, self.split) in (*_IN_TURNS, _SCATTERED_IN_TURNS)
        fast = self.waves == 1 or (self.waves == 2 and known) or self.way == "ends"
        if self.split > 1 and (tile.rows < all_rows or not fast):
            return False
        return 2 * peers * self.tiles * tile.rows * tile.columns * 2 <= _MAILBOX_BYTES

    def us(self) -> float:
        """Predicted time. Units: microseconds."""
        gemm, machine = self.site.gemm(), self.site.machine
        constants = machine.constants
        world = self.site.problem.world_size
        share = (world - 1) / world if self.site.problem.operator == "gemm_reduce_scatter" else world - 1
        sent_bytes = gemm.m * gemm.n * gemm.dtype_bytes * share
        link = machine.link_us(sent_bytes, constants.stream_link_fraction)
        # What a wave sends moves beside the products of the next, and slows them; the last wave's beside nothing.
        last = 0.0 if self.peers_first() else link / self.waves
        slower = {
            "turns": constants.stream_turns,
            "ends": constants.stream_turns,
            "handed": constants.stream_overlap,
            "together": 0.0,
        }
        busy = self.busy_us() * (1 + slower[self.way])
        if self.way == "ends":  # the tiles before the last are whole
            busy = max(busy, busy * (1 - 1 / self.waves) + 2 * link / self.waves)
        elif self.way == "turns":  # a group sends its tile and waits for the peers' before it multiplies its next one
            epilogue, tiles = link / self.waves + constants.mailbox_us + self.exchange_us(), self.waves / 2
            busy = max(busy, busy / self.waves * (1 + tiles) + (tiles - 1) * epilogue)
        done = max(busy + last, busy / self.waves + link)
        return self.product_us() - self.busy_us() + done + constants.mailbox_us

    def peers_first(self) -> bool:
        """Are all tiles of the peers multiplied before the first own one? As StreamOrder on the device.

        That is where blocks have several tiles, which are sent beside products, and a cache keeps the weight.
        """
        gemm = self.site.gemm()
        if self.way == "together" or gemm.n * gemm.k * gemm.dtype_bytes > _CACHED_BYTES:
            return False
        problem = self.site.problem
        owned_tiles = gemm.m // problem.world_size // self.tile.rows * ceil(gemm.n / self.tile.columns)
        whole = gemm.m % (problem.world_size * self.tile.rows) == 0 and problem.outer <= 1
        clusters = ceil(self.tiles / self.waves)
        return problem.operator == "gemm_reduce_scatter" and whole and owned_tiles % clusters == 0

    def product_us(self) -> float:
        """The product alone, its launch included."""
        return self.site.machine.constants.stream_launch_us + self.busy_us() + self.exchange_us()

    def exchange_us(self) -> float:
        """What the blocks of a cluster give each other of one tile."""
        exchanged = (self.split - 1) * self.tile.rows * self.tile.columns
        return self.site.machine.constants.cluster_us * exchanged / _EXCHANGED

    def busy_us(self) -> float:
        """What multiplies and what streams, the longer of them."""
        gemm, machine = self.site.gemm(), self.site.machine
        constants, gpu = machine.constants, machine.topology.gpu
        efficiency = constants.stream_tiles[str(self.tile).rpartition("x")[0]]
        one = tile_us(self.tile.rows, self.tile.columns, gemm, gpu, constants) / efficiency / self.split
        own_bytes = (self.tile.rows + self.tile.columns) * gemm.k / self.split * gemm.dtype_bytes
        busy = self.waves * max(one + constants.stream_start_us, own_bytes / constants.sm_load_gbps * 1e-3)
        row_tiles = ceil(gemm.m / self.tile.rows)
        weight_bytes = gemm.k * gemm.n * gemm.dtype_bytes
        read_bytes = gemm.bytes + constants.stream_reread * (row_tiles - 1) * weight_bytes
        memory = read_bytes / (gpu.hbm_gbps * constants.hbm_fraction) * 1e-3
        return p_norm(busy, memory, constants.stream_exponent)


def p_norm(first: float, second: float, exponent: float) -> float:
    """A smooth maximum."""
    longer = max(first, second)
    return longer * float(((first / longer) ** exponent + (second / longer) ** exponent) ** (1 / exponent))


def _can_share(tile: Tile, split: int) -> bool:
    """Can the blocks of a cluster share such a tile?"""
    group_columns = tile.columns if tile.rows > _MATH_GROUP_ROWS else tile.columns // 2
    return group_columns % (_UNIT_COLUMNS * split) == 0


def stream_forms() -> Iterator[tuple[Tile, int]]:
    """All tiles, each with the numbers of blocks that can share it."""
    return ((tile, split) for tile, split in product(STREAM_TILES, SPLITS) if _can_share(tile, split))


def ways_of(operator: str, tile: Tile, split: int) -> Iterator[Way]:
    """What math groups may do in a plan's kernel: what `Stream.way` can be of a reduction."""
    form = (tile.rows, tile.columns, split)
    yield "together"
    if operator == "all_gather_gemm":
        return
    if form in _IN_TURNS or (form == _SCATTERED_IN_TURNS and operator == "gemm_reduce_scatter"):
        yield "turns"
    if split == 1 and form[:2] in _HANDED_OVER:
        yield "handed"
    if form == _ENDS_SHARED and operator == "gemm_all_reduce":
        yield "ends"


def stream_candidates(site: Site) -> Iterator[Candidate]:
    """All tiles and splits that are possible, inside one node."""
    if site.span.num_nodes > 1 or site.problem.num_gemms > 1:
        return
    for tile, split in stream_forms():
        stream = Stream(site=site, tile=tile, split=split)
        if not stream.possible():
            continue
        roles = Roles(compute=stream.blocks, reserve=site.topology.gpu.num_sms - stream.blocks)
        case = replace(site.case(site.gemm(), tile), roles=roles)
        plan = replace(plan_of(site, case, "stream", transport=transport_of(stream.way)), split=split)
        yield Candidate(plan=plan, seconds=stream.us() * 1e-6)


def transport_of(way: Way) -> str:
    """How a plan names the way."""
    return "store" if way == "together" else way
