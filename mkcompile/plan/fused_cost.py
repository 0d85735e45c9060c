"""How long a fused kernel takes: two stages, tensor cores and link, that overlap but for their fill and drain.

    T = max(compute + drain of the link, fill of the link + link)          (equation 1 of the mKernel paper)

Compute is whole waves of tiles on the SMs that are left for it. Reductions follow the equation wave by wave
(`waves.py`); for others the maximum is smooth, since two stages that are equally long disturb each other. Link is bytes
over what the role's blocks can push. All times in microseconds; none falls when m, n or k grows.
Source: `benchmarks/results/2xh200/ops.jsonl`, `link.json`; arXiv 2609.13585, equation 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from mkcompile.plan.collective_cost import network_bytes
from mkcompile.plan.constants import Constants
from mkcompile.plan.gemm_cost import Gemm, num_tiles, stream_us, throttled, tile_us
from mkcompile.plan.plan import Roles, Tile
from mkcompile.plan.topology import Span, Topology

# Elements of a panel.
_PANEL = 128 * 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """The compute stage: `total_us` of `waves` waves, `tile_us` each."""

    total_us: float
    tile_us: float
    waves: int
    tiles: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What all cost functions need."""

    topology: Topology
    constants: Constants

    def link_us(self, sent_bytes: float, fraction: float) -> float:
        """Time on NVLink at a fraction of its data-sheet bandwidth."""
        return sent_bytes / (self.topology.nvlink_gbps * fraction) * 1e-3

    @property
    def network_fraction(self) -> float:
        """What messages reach of the network's rate: the emulated one counts their bytes alone, a NIC the wire's."""
        emulated = self.topology.transport == "emulated"
        return self.constants.emulated_fraction if emulated else self.constants.network_fraction

    @property
    def trip_us(self) -> float:
        """From a command of a kernel to the flag on the other node, beside the message's bytes."""
        return self.constants.proxy_us + self.topology.nic_latency_us

    def push_fraction(self, blocks: int) -> float:
        """What so many blocks can push; each SM has a limit of its own."""
        return min(self.constants.push_fraction, blocks * self.constants.push_block_fraction)


def smooth_max(first: float, second: float, constants: Constants) -> float:
    """A p-norm: the longer stage, or up to 2^(1/p) times it where both are equal."""
    longer = max(first, second)
    if longer <= 0:
        return 0.0
    p = constants.overlap_exponent
    return longer * float(((first / longer) ** p + (second / longer) ** p) ** (1 / p))


def compute_stage(gemm: Gemm, tile: Tile, roles: Roles, machine: Machine, positions: int = 0) -> Compute:
    """The product on the compute SMs, by whole waves, without a launch.

    `positions`: tiles of the launch where owners have unequal numbers of them and all ranks walk as many; 0: the tiles.
    """
    constants, gpu = machine.constants, machine.topology.gpu
    efficiency = constants.own_tiles[f"{tile.rows}x{tile.columns}"]
    one = tile_us(tile.rows, tile.columns, gemm, gpu, constants) * constants.own_gemm_factor / efficiency
    tiles = positions or num_tiles(gemm, tile.rows, tile.columns)
    waves = ceil(tiles / roles.compute)
    total = max(throttled(waves * (one + overhead_us(tile, constants)), constants), stream_us(gemm, gpu, constants))
    return Compute(total_us=total, tile_us=one, waves=waves, tiles=tiles)


def overhead_us(tile: Tile, constants: Constants) -> float:
    """What the tensor cores wait for between two tiles of an SM: the beginning of one, the panels of the other."""
    return constants.tile_start_us + constants.tile_panel_us * tile.rows * tile.columns / _PANEL


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One product with its group, tile and division of the SMs."""

    gemm: Gemm
    span: Span
    tile: Tile
    roles: Roles
    machine: Machine
    positions: int = 0

    @property
    def most_blocks(self) -> int:
        """Compute blocks of a launch that fills the GPU; roles may have fewer where that costs no wave."""
        return self.roles.compute + self.roles.reserve

    def compute(self) -> Compute:
        """The compute stage."""
        return compute_stage(self.gemm, self.tile, self.roles, self.machine, self.positions)

    @property
    def tile_bytes(self) -> int:
        """One tile of the output."""
        return self.tile.rows * self.tile.columns * self.gemm.dtype_bytes

    @property
    def output_bytes(self) -> int:
        """The output, not divided."""
        return self.gemm.m * self.gemm.n * self.gemm.dtype_bytes

    def network_us(self, kind: str, tensor_bytes: float) -> float:
        """Time on the network, 0 inside one node: the bytes, and the way of the messages that wait for each other. An
        all-reduce's last finished tile follows the last partial; a gathered shard goes from node to node.
        """
        sent = network_bytes(kind, tensor_bytes, self.span)
        if sent <= 0:
            return 0.0
        trips = {"all_reduce": 2, "all_gather": self.span.num_nodes - 1}.get(kind, 1)
        gbps = self.machine.topology.nic_gbps * self.machine.network_fraction
        return trips * self.machine.trip_us + sent / gbps * 1e-3


def links_us(nvlink_us: float, network_us: float, constants: Constants) -> float:
    """One link alone takes its own time. Both side by side, where a node has several ranks, take longer than the longer
    one, and a fixed time: taken from published kernels, nothing of it was measured here.
    """
    if min(nvlink_us, network_us) <= 0:
        return nvlink_us + network_us
    return constants.across_fixed_us + constants.across_factor * max(nvlink_us, network_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """What runs in the same launch before a product: in all, and until the product's first tile can start."""

    total_us: float = 0.0
    first_us: float = 0.0


def gather_us(case: Case) -> float:
    """All-gather of [m, k] by blocks of the role, under the product: own rows first, the others as they come."""
    constants, machine = case.machine.constants, case.machine
    compute = case.compute()
    gathered = case.gemm.m * case.gemm.k * case.gemm.dtype_bytes
    crossing = gathered * (case.span.per_node - 1) / case.span.per_node
    link = machine.link_us(crossing, machine.push_fraction(case.roles.intra))
    load = constants.push_interference * link / max(link, compute.total_us)
    busy = constants.gemm_launch_us + compute.total_us * (1 + load)
    moving = links_us(link, case.network_us("all_gather", gathered), constants)
    arrival = constants.gemm_launch_us + moving + constants.flag_us + compute.tile_us
    return smooth_max(busy, arrival, constants)


def on_chip_ffn_us(up: Case, down: Case, *, final: float) -> float:
    """Feed-forward network whose hidden tiles never leave the SM: the output is added up tile by tile in fp32, and only
    a finished output can be reduced over the ranks, so nothing of the link is hidden.
    """
    constants, machine = up.machine.constants, up.machine
    first, second = up.compute(), down.compute()
    payload_bytes = 4.0 * down.gemm.m * down.gemm.n * ceil(down.gemm.k / up.tile.columns)
    adding = max(second.total_us, payload_bytes / constants.tile_reduce_gbps * 1e-3)
    crossing = down.output_bytes * (down.span.per_node - 1) / down.span.per_node
    link = machine.link_us(crossing * (1 + final), constants.push_fraction)
    flags = constants.flag_us * (2 if final > 0 else 1)
    return constants.gemm_launch_us + first.total_us + adding + link + flags
