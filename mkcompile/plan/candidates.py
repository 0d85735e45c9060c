"""Every way to carry out a problem with a fused kernel, each with its predicted time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from mkcompile.ops.problem import Problem
from mkcompile.plan import fused_cost as cost
from mkcompile.plan.constants import constants
from mkcompile.plan.fused_cost import Before, Case, Machine
from mkcompile.plan.gemm_cost import Gemm
from mkcompile.plan.plan import Plan, Roles, Tile
from mkcompile.plan.topology import Span, Topology

TILES = tuple(
    Tile(rows=rows, columns=columns)
    for rows, columns in (
        (128, 256), (128, 224), (128, 192), (128, 160), (128, 128), (128, 64),
        (64, 256), (64, 128), (64, 64), (64, 32),
    )
)  # fmt: skip
PUSH_BLOCKS = (4, 8, 16)
SHARD_CHUNKS = (1, 2, 4, 8)
_PUSH_CHUNK_BYTES = 16 << 10
_PACED_SHARE = 0.8
_LINK_BOUND = 0.9
# Fewer and shorter: two waves before the first own tile would leave the link idle at the end (decision 302).
_FEW_WAVES, _SHORT_US = 4, 100.0
_PANEL_COLUMNS = 64
_FFN_PANEL_ROWS = 2048
_SEND, _RECEIVE, _INTRA_ACROSS = 4, 4, 8
_SHARED_BYTES = 227 << 10
_MAX_STAGES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One plan and its predicted time. Units: seconds."""

    plan: Plan
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A problem on a machine, with the SMs that a launch has to leave alone."""

    problem: Problem
    topology: Topology
    reserve_sms: int

    @property
    def span(self) -> Span:
        """Where the group lies."""
        return self.topology.span(self.problem.world_size)

    @property
    def machine(self) -> Machine:
        """Topology and constants."""
        return Machine(topology=self.topology, constants=constants())

    def gemm(self) -> Gemm:
        """The product; of an FFN the down projection."""
        one = self.problem
        return Gemm(m=one.m, n=one.n, k=one.hidden or one.k, dtype_bytes=one.dtype_bytes)

    def up_gemm(self) -> Gemm:
        """An FFN's up projection, gate included."""
        one = self.problem
        return Gemm(m=one.m, n=one.hidden * (2 if one.gated else 1), k=one.k, dtype_bytes=one.dtype_bytes)

    def case(self, gemm: Gemm, tile: Tile, intra: int = 0, positions: int = 0) -> Case:
        """The product with the SMs divided: as few compute blocks as keep the number of waves."""
        across = self.span.num_nodes > 1
        send, receive = (_SEND, _RECEIVE) if across else (0, 0)
        intra = max(intra, _INTRA_ACROSS) if across else intra
        limit = max(1, self.topology.gpu.num_sms - self.reserve_sms - intra - send - receive)
        tiles = positions or ceil(gemm.m / tile.rows) * ceil(gemm.n / tile.columns)
        compute = _even_grid(tiles, limit, self.problem.world_size)
        roles = Roles(compute=compute, intra=intra, send=send, receive=receive)
        roles = replace(roles, reserve=self.topology.gpu.num_sms - roles.grid)
        return Case(gemm=gemm, span=self.span, tile=tile, roles=roles, machine=self.machine, positions=positions)


def _even_grid(tiles: int, limit: int, world_size: int) -> int:
    """The fewest blocks that need no more waves than `limit` blocks do; a multiple of the world size where it fits."""
    waves = ceil(max(tiles, 1) / limit)
    grid = ceil(max(tiles, 1) / waves)
    return min(ceil(grid / world_size) * world_size, limit)


def candidates(site: Site) -> Iterator[Candidate]:
    """All candidates, in a fixed order, better guesses first."""
    makers = {
        "gemm_reduce_scatter": _reduce_scatter,
        "gemm_all_reduce": _all_reduce,
        "all_gather_gemm": _all_gather,
        "ffn": _ffn,
    }
    maker = makers.get(site.problem.operator)
    return iter(()) if maker is None else maker(site)


def _reduce_scatter(site: Site) -> Iterator[Candidate]:
    for tile in TILES:
        case = site.case(site.gemm(), tile, positions=_scattered_positions(site.problem, tile))
        yield _reduction(site, case, "push", cost.reduce_us(case, final=0), final=0)


def _scattered_positions(problem: Problem, tile: Tile) -> int:
    """Tiles of all owners where every segment of rows is cut up by itself."""
    segments = max(problem.outer, 1)
    segment_rows = ceil(problem.m / (segments * problem.world_size))
    per_owner = ceil(segment_rows / tile.rows) * segments * ceil(problem.n / tile.columns)
    return per_owner * problem.world_size


def _all_reduce(site: Site) -> Iterator[Candidate]:
    world = site.problem.world_size
    for tile in TILES:
        tiles = ceil(site.problem.m / tile.rows) * ceil(site.problem.n / tile.columns)
        case = site.case(site.gemm(), tile, positions=ceil(tiles / world) * world)
        yield _reduction(site, case, "direct", cost.reduce_us(case, final=1), final=1)
        yield _reduction(site, case, "staged", cost.reduce_us(case, final=1, copy_out=True), final=1)
        if site.topology.multicast and site.span.per_node > 2:
            in_switch = 1 / (site.span.per_node - 1)
            yield _reduction(site, case, "multicast", cost.reduce_us(case, final=in_switch), final=in_switch)
        if site.span.num_nodes == 1:
            yield _reduction(site, case, "one_shot", cost.one_shot_us(case), final=0)


def _reduction(site: Site, case: Case, variant: str, us: float, final: float) -> Candidate:
    """A reducing kernel with its order and pace."""
    compute = case.compute()
    sent = case.output_bytes * (case.span.per_node - 1) / case.span.per_node * (1 + final)
    link = case.machine.link_us(sent, case.machine.constants.push_fraction)
    link_bound = link >= _LINK_BOUND * compute.total_us
    short = compute.waves <= _FEW_WAVES and compute.total_us < _SHORT_US
    lag_positions = case.roles.compute * (1 if short else 2)
    peers = max(1, site.problem.world_size - 1)
    panels = max(1, case.tile.columns // _PANEL_COLUMNS)
    plan = _plan(site, case, variant, transport="multicast" if variant == "multicast" else "store")
    paced = plan.variant != "one_shot" and not link_bound
    pace_ns = int(_PACED_SHARE * compute.tile_us * 1000 / panels) if paced else 0
    lag = 0 if variant == "one_shot" else max(1, ceil(lag_positions / peers))
    return Candidate(plan=replace(plan, lag=lag, pace_ns=pace_ns), seconds=us * 1e-6)


def _all_gather(site: Site) -> Iterator[Candidate]:
    shard_bytes = site.problem.m * site.problem.k * site.problem.dtype_bytes // site.problem.world_size
    for tile in TILES:
        for blocks in PUSH_BLOCKS:
            case = site.case(site.gemm(), tile, intra=blocks)
            us = cost.gather_us(case, copy_engine=False, num_chunks=0)
            plan = _plan(site, case, "push", transport="store", chunk_bytes=_PUSH_CHUNK_BYTES)
            yield Candidate(plan=plan, seconds=us * 1e-6)
        case = site.case(site.gemm(), tile)
        for chunks in SHARD_CHUNKS:
            us = cost.gather_us(case, copy_engine=True, num_chunks=chunks * (site.span.per_node - 1))
            plan = _plan(site, case, "copy_engine", transport="copy_engine", chunk_bytes=ceil(shard_bytes / chunks))
            yield Candidate(plan=plan, seconds=us * 1e-6)
        if site.span.num_nodes == 1:
            plan = _plan(site, case, "remote_read", transport="load")
            yield Candidate(plan=plan, seconds=cost.remote_read_us(case) * 1e-6)
    if site.span.num_nodes == 1:
        case = site.case(site.gemm(), TILES[0])
        plan = _plan(site, case, "library", transport="copy_engine", chunk_bytes=shard_bytes)
        yield Candidate(plan=plan, seconds=cost.gather_by_library_us(case) * 1e-6)


def _ffn(site: Site) -> Iterator[Candidate]:
    final = 0.0 if site.problem.scatters else 1.0
    for tile in TILES:
        up, down = site.case(site.up_gemm(), tile), site.case(site.gemm(), tile)
        total_us = up.compute().total_us
        if site.problem.gathers:
            gathering = site.case(site.up_gemm(), tile, intra=PUSH_BLOCKS[1])
            total_us = cost.gather_us(gathering, copy_engine=False, num_chunks=0)
        panel = replace(site.up_gemm(), m=min(site.problem.m, _FFN_PANEL_ROWS))
        before = Before(total_us=total_us, first_us=min(total_us, site.case(panel, tile).compute().total_us))
        us = cost.reduce_us(down, final=final, before=before)
        yield _reduction(site, down, "two_phase", us, final)
        if not site.problem.gathers and site.span.num_nodes == 1:
            yield _reduction(site, down, "on_chip", cost.on_chip_ffn_us(up, down, final=final), final)


def _plan(site: Site, case: Case, variant: str, transport: str, chunk_bytes: int = 0) -> Plan:
    return Plan(
        operator=site.problem.operator,
        variant=variant,
        world_size=site.problem.world_size,
        tile=case.tile,
        stages=_stages(case.tile, site.problem.dtype_bytes),
        roles=case.roles,
        transport=transport if case.span.num_nodes == 1 else f"{transport}+network",
        chunk_bytes=chunk_bytes,
    )


def _stages(tile: Tile, dtype_bytes: int) -> int:
    """As many as fit beside a whole tile of output."""
    stage_bytes = (tile.rows + tile.columns) * tile.depth * dtype_bytes + 16
    room = _SHARED_BYTES - 2048 - tile.rows * tile.columns * dtype_bytes
    return max(2, min(_MAX_STAGES, room // stage_bytes))
