"""How long a reduction takes, wave by wave: products, pushes and own tiles that wait for the partials of peers.

A wave lasts as long as its products or as what it pushes, whichever is longer: an SM whose pushes wait for the link is
not given operands either. Own tiles come `lag` waves behind the peers' tiles of the same turn: with one wave between
them, they also wait for the flag. Units: microseconds.
Source: `benchmarks/results/2xh200/ops.jsonl`; docs/decisions/201-two-stage-model.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from mkcompile.plan.fused_cost import Before, Case, Compute, links_us, smooth_max

# Fewer and shorter: two waves before the first own tile would leave the link idle at the end (decision 302).
_FEW_WAVES, _SHORT_US = 4, 100.0
# Partials that take so much of the computation: two waves of large ones would wait for each other on the link, and of
# any where finished tiles are copied out as well (decision 302).
_LINK_BUSY, _LARGE_TILE = 0.65, 128 * 256
# Beside nothing, copying out takes as long as of so many waves beside products: 2 to 3 us of a tile of 128x64, 5 to 10
# of 128x128, 12 to 14 of 128x256, staged less direct in `benchmarks/results/2xh200/small.jsonl`.
_COPIED_ALONE = 7.0
# Of one owner, for a lag of a whole one.
_LEAST_BANDS = 8


def whole_band(lag: int, band_tiles: int, owned_tiles: int) -> int:
    """A reduce-scatter's lag at which own and peers' tiles of a wave read the same columns of the weight: a band of the
    raster, where an owner has many. Others keep `lag`, of which a narrow band is a part. Source: decision 302.
    """
    fits = owned_tiles % band_tiles == 0 and owned_tiles >= _LEAST_BANDS * band_tiles
    return band_tiles if fits and band_tiles > lag else lag


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """A product whose tiles go to their owner, who adds them and passes the result on.

    `final`: bytes of the second round, in units of the scattered output's crossing (0: reduce-scatter, 1: all-reduce
    with a store to each peer, less with multicast). `copy_out`: the result ends in ordinary memory, copied by a spare
    warp of each block. `lag`: waves of peers' tiles before the first own one; 0: as the planner takes it.
    """

    case: Case
    final: float
    copy_out: bool = False
    lag: float = 0.0

    @property
    def crossing_us(self) -> float:
        """Both rounds on NVLink."""
        case = self.case
        crossing = case.output_bytes * (case.span.per_node - 1) / case.span.per_node
        return case.machine.link_us(crossing * (1 + self.final), case.machine.constants.push_fraction)

    def lag_waves(self, compute: Compute) -> float:
        """One or two waves."""
        if self.lag:
            return self.lag
        short = compute.waves <= _FEW_WAVES and compute.total_us < _SHORT_US
        is_flooded = self.crossing_us / (1 + self.final) >= _LINK_BUSY * compute.total_us
        large = self.final == 0 and self.case.tile.rows * self.case.tile.columns >= _LARGE_TILE
        return 1.0 if short or (is_flooded and (large or self.copy_out)) else 2.0

    def us(self, before: Before | None = None) -> float:
        """`before`: products before this one in the same launch."""
        case, constants, before = self.case, self.case.machine.constants, before or Before()
        compute = case.compute()
        busy = constants.gemm_launch_us + before.total_us + self._waves_us(compute) + self._drain_us(compute)
        busy += constants.reduction_start_us if case.span.per_node > 1 else 0.0
        network = case.network_us("all_reduce" if self.final > 0 else "reduce_scatter", case.output_bytes)
        if network == 0:
            return busy
        fill = constants.gemm_launch_us + before.first_us + compute.tile_us
        moving = fill + links_us(self.crossing_us, network, constants)
        return smooth_max(busy + case.machine.trip_us, moving, constants)

    def _waves_us(self, compute: Compute) -> float:
        """First waves of peers' tiles alone, then of both, then of own tiles alone."""
        case, constants = self.case, self.case.machine.constants
        each = compute.total_us / compute.waves
        peers, blocks = case.span.per_node - 1, min(case.roles.compute, compute.tiles)
        pushed = case.machine.link_us(blocks * case.tile_bytes, constants.push_fraction) if peers else 0.0
        others = peers / case.span.per_node  # of all tiles those of peers
        lag = min(self.lag_waves(compute), others * compute.waves)
        mixed = compute.waves - lag / others if others else 0.0
        own = compute.waves - lag - mixed
        waited = constants.flag_us + constants.partial_us - max(0.0, lag - 1) * each  # what of it waves do not hide
        flag = max(0.0, waited) if peers else 0.0
        if peers and compute.waves == 1:  # nothing hides what is pushed: own tiles run beside the peers', and wait
            alone = each + min(pushed * others + constants.partial_us, _wave_us(each, pushed, flag))
            return alone + self._copied_us(_COPIED_ALONE)
        total = each + max(0.0, lag - 1) * max(each, pushed) + min(lag, 1.0) * _wave_us(each, pushed, flag)
        total += mixed * _wave_us(each, pushed * others * (1 + self.final), flag)
        total += (own - 1) * (max(each, pushed * peers * self.final) if own > 1 else each)  # of the last: see the drain
        return total + self._copied_us(compute.waves)

    def _copied_us(self, waves: float) -> float:
        """What copying out takes of the products' time."""
        if not self.copy_out:
            return 0.0
        copied = self.case.tile.rows * self.case.tile.columns / _LARGE_TILE
        return self.case.machine.constants.copy_out_us * copied * waves

    def _drain_us(self, compute: Compute) -> float:
        """The last wave's finished tiles cross when nothing is left to hide them."""
        case, constants = self.case, self.case.machine.constants
        last = min(case.most_blocks, ceil(compute.tiles / case.span.world_size)) * case.tile_bytes
        crossing = case.machine.link_us(last * (case.span.per_node - 1) * self.final, constants.push_fraction)
        return constants.flag_us * (2 if self.final > 0 else 1) + crossing


def _wave_us(products: float, pushed: float, flag: float) -> float:
    """A wave with own tiles that wait for the last one's pushes. A busy link hides the flag: other pushes go on."""
    return max(products, pushed, min(products, pushed) + flag)
