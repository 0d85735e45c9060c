"""Every way to carry out a problem with a fused kernel, each with its predicted time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from mkcompile.ops.problem import Problem
from mkcompile.plan import fused_cost as cost
from mkcompile.plan.fused_cost import Before
from mkcompile.plan.gather import gather_candidates
from mkcompile.plan.plan import Tile
from mkcompile.plan.site import Candidate, Site, plan_of
from mkcompile.plan.stream import stream_candidates
from mkcompile.plan.waves import Reduction, whole_band

__all__ = ["TILES", "Candidate", "Site", "candidates"]

TILES = tuple(
    Tile(rows=rows, columns=columns)
    for rows, columns in (
        (128, 256), (128, 224), (128, 192), (128, 160), (128, 128), (128, 64),
        (64, 256), (64, 128), (64, 64), (64, 32),
    )
)  # fmt: skip
_FFN_PUSH_BLOCKS = 8
_PACED_SHARE = 0.8
_LINK_BOUND = 1.04
# Each tile is told of by itself: smaller ones only where these do not fill the SMs (decision 302).
_SMALLEST_OF_MANY = 128 * 128
_PANEL_COLUMNS = 64
_FFN_PANEL_ROWS = 2048


def candidates(site: Site) -> Iterator[Candidate]:
    """All candidates, in a fixed order, better guesses first."""
    makers = {
        "gemm_reduce_scatter": _reduce_scatter,
        "gemm_all_reduce": _all_reduce,
        "all_gather_gemm": gather_candidates,
        "ffn": _ffn,
    }
    maker = makers.get(site.problem.operator)
    return iter(()) if maker is None else maker(site)


def _reduce_scatter(site: Site) -> Iterator[Candidate]:
    for tile in _tiles(site):
        case = site.case(site.gemm(), tile, positions=_scattered_positions(site.problem, tile))
        yield _reduction(site, Reduction(case=case, final=0), "push")
    yield from stream_candidates(site)


def _tiles(site: Site) -> Iterator[Tile]:
    """Of kernels that reduce."""
    problem = site.problem
    fills = ceil(problem.m / 128) * ceil(problem.n / 128) >= site.topology.gpu.num_sms
    return (tile for tile in TILES if not fills or tile.rows * tile.columns >= _SMALLEST_OF_MANY)


def _scattered_positions(problem: Problem, tile: Tile) -> int:
    """Tiles of all owners where every segment of rows is cut up by itself."""
    segments = max(problem.outer, 1)
    segment_rows = ceil(problem.m / (segments * problem.world_size))
    per_owner = ceil(segment_rows / tile.rows) * segments * ceil(problem.n / tile.columns)
    return per_owner * problem.world_size


def _all_reduce(site: Site) -> Iterator[Candidate]:
    world = site.problem.world_size
    for tile in _tiles(site):
        tiles = ceil(site.problem.m / tile.rows) * ceil(site.problem.n / tile.columns)
        case = site.case(site.gemm(), tile, positions=ceil(tiles / world) * world)
        yield _reduction(site, Reduction(case=case, final=1), "direct")
        yield _reduction(site, Reduction(case=case, final=1, copy_out=True), "staged")
        if site.topology.multicast and site.span.per_node > 2:
            yield _reduction(site, Reduction(case=case, final=1 / (site.span.per_node - 1)), "multicast")
    yield from stream_candidates(site)


def _reduction(site: Site, one: Reduction, variant: str, us: float | None = None) -> Candidate:
    """A reducing kernel with its order and pace; `us`: what it takes, where that is more than the reduction."""
    case, compute, link = one.case, one.case.compute(), one.crossing_us
    link_bound = link >= _LINK_BOUND * compute.total_us
    lag_positions = case.roles.compute * one.lag_waves(compute)
    peers = max(1, site.problem.world_size - 1)
    panels = max(1, case.tile.columns // _PANEL_COLUMNS)
    plan = plan_of(site, case, variant, transport="multicast" if variant == "multicast" else "store")
    pace_ns = 0 if link_bound or link == 0 else int(_PACED_SHARE * compute.tile_us * 1000 / panels)
    lag = max(1, ceil(lag_positions / peers))
    if one.final == 0 and one.lag_waves(compute) == 2:
        lag = whole_band(lag, plan.raster * ceil(site.problem.n / case.tile.columns), case.positions // (peers + 1))
    plan = replace(plan, lag=lag, pace_ns=pace_ns)
    return Candidate(plan=plan, seconds=(one.us() if us is None else us) * 1e-6)


def _ffn(site: Site) -> Iterator[Candidate]:
    final = 0.0 if site.problem.scatters else 1.0
    for tile in TILES:
        up, down = site.case(site.up_gemm(), tile), site.case(site.gemm(), tile)
        total_us = up.compute().total_us
        if site.problem.gathers:
            gathering = site.case(site.up_gemm(), tile, intra=_FFN_PUSH_BLOCKS)
            total_us = cost.gather_us(gathering)
        panel = replace(site.up_gemm(), m=min(site.problem.m, _FFN_PANEL_ROWS))
        before = Before(total_us=total_us, first_us=min(total_us, site.case(panel, tile).compute().total_us))
        one = Reduction(case=down, final=final)
        yield _reduction(site, one, "two_phase", one.us(before))
        if not site.problem.gathers and site.span.num_nodes == 1:
            yield _reduction(site, one, "on_chip", cost.on_chip_ffn_us(up, down, final=final))
