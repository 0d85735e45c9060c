"""A problem on a machine: what all ways to carry it out begin with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from mkcompile.ops.problem import Problem
from mkcompile.plan.constants import Constants, constants
from mkcompile.plan.fused_cost import Case, Machine
from mkcompile.plan.gemm_cost import Gemm
from mkcompile.plan.plan import Plan, Roles, Tile
from mkcompile.plan.topology import Span, Topology

_SHARED_BYTES = 227 << 10
_MAX_STAGES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One plan and its predicted time. Units: seconds."""

    plan: Plan
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A problem on a machine, with the SMs that a launch has to leave alone. `known`: other constants than ours."""

    problem: Problem
    topology: Topology
    reserve_sms: int
    known: Constants | None = None

    @property
    def span(self) -> Span:
        """Where the group lies."""
        return self.topology.span_of(self.problem)

    @property
    def machine(self) -> Machine:
        """Topology and constants."""
        return Machine(topology=self.topology, constants=self.known or constants())

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
        limit = max(1, self.topology.gpu.num_sms - self.reserve_sms - intra)
        tiles = positions or ceil(gemm.m / tile.rows) * ceil(gemm.n / tile.columns)
        compute = _even_grid(tiles, limit, self.problem.world_size)
        roles = Roles(compute=compute, intra=intra)
        roles = replace(roles, reserve=self.topology.gpu.num_sms - roles.grid)
        return Case(gemm=gemm, span=self.span, tile=tile, roles=roles, machine=self.machine, positions=positions)


def _even_grid(tiles: int, limit: int, world_size: int) -> int:
    """The fewest blocks that need no more waves than `limit` blocks do; a multiple of the world size where it fits."""
    waves = ceil(max(tiles, 1) / limit)
    grid = ceil(max(tiles, 1) / waves)
    return min(ceil(grid / world_size) * world_size, limit)


def plan_of(site: Site, case: Case, variant: str, transport: str, chunk_bytes: int = 0) -> Plan:
    return Plan(
        operator=site.problem.operator,
        variant=variant,
        world_size=site.problem.world_size,
        tile=case.tile,
        stages=stages_of(case.tile, site.problem.dtype_bytes),
        roles=case.roles,
        transport=transport if case.span.num_nodes == 1 else f"{transport}+network",
        chunk_bytes=chunk_bytes,
    )


def stages_of(tile: Tile, dtype_bytes: int) -> int:
    """As many as fit beside a whole tile of output."""
    stage_bytes = (tile.rows + tile.columns) * tile.depth * dtype_bytes + 16
    room = _SHARED_BYTES - 2048 - tile.rows * tile.columns * dtype_bytes
    return max(2, min(_MAX_STAGES, room // stage_bytes))
