"""Every way to carry out a problem with a fused kernel, each with its predicted time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from mkcompile.ops.problem import Problem
from mkcompile.plan import fused_cost as cost
from mkcompile.plan.fused_cost import Before, Case
from mkcompile.plan.gather import gather_candidates
from mkcompile.plan.plan import Tile
from mkcompile.plan.site import Candidate, Site, plan_of
from mkcompile.plan.stream import stream_candidates

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
# Fewer and shorter: two waves before the first own tile would leave the link idle at the end (decision 302).
_FEW_WAVES, _SHORT_US = 4, 100.0
# Partials that take so much of the computation: two waves of large ones would wait for each other on the link, and of
# any where finished tiles are copied out as well (decision 302).
_LINK_BUSY, _LARGE_TILE = 0.65, 128 * 256
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
        yield _reduction(site, case, "push", cost.reduce_us(case, final=0), final=0)
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
        yield _reduction(site, case, "direct", cost.reduce_us(case, final=1), final=1)
        yield _reduction(site, case, "staged", cost.reduce_us(case, final=1, copy_out=True), final=1)
        if site.topology.multicast and site.span.per_node > 2:
            in_switch = 1 / (site.span.per_node - 1)
            yield _reduction(site, case, "multicast", cost.reduce_us(case, final=in_switch), final=in_switch)
    yield from stream_candidates(site)


def _reduction(site: Site, case: Case, variant: str, us: float, final: float) -> Candidate:
    """A reducing kernel with its order and pace."""
    compute = case.compute()
    sent = case.output_bytes * (case.span.per_node - 1) / case.span.per_node * (1 + final)
    link = case.machine.link_us(sent, case.machine.constants.push_fraction)
    link_bound = link >= _LINK_BOUND * compute.total_us
    short = compute.waves <= _FEW_WAVES and compute.total_us < _SHORT_US
    is_flooded = link / (1 + final) >= _LINK_BUSY * compute.total_us
    large = final == 0 and case.tile.rows * case.tile.columns >= _LARGE_TILE
    one_wave = short or (is_flooded and (large or variant == "staged"))
    lag_positions = case.roles.compute * (1 if one_wave else 2)
    peers = max(1, site.problem.world_size - 1)
    panels = max(1, case.tile.columns // _PANEL_COLUMNS)
    plan = plan_of(site, case, variant, transport="multicast" if variant == "multicast" else "store")
    pace_ns = 0 if link_bound or sent == 0 else int(_PACED_SHARE * compute.tile_us * 1000 / panels)
    plan = replace(plan, lag=max(1, ceil(lag_positions / peers)), pace_ns=pace_ns)
    return Candidate(plan=plan, seconds=us * 1e-6)


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
        us = cost.reduce_us(down, final=final, before=before)
        yield _reduction(site, down, "two_phase", us, final)
        if not site.problem.gathers and site.span.num_nodes == 1:
            yield _reduction(site, down, "on_chip", cost.on_chip_ffn_us(up, down, final=final), final)
