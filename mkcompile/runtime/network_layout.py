"""How a launch over several nodes divides a staging region, and how its tiles are put together into network messages.

A local owner of a node handles its own tiles and those of its rail peers on the other nodes. Sums for rail peers leave
from the outbox and come into the owner's inbox; an all-reduce's finished tiles go back by a second pair of boxes.
"""

from __future__ import annotations

from dataclasses import dataclass

from mkcompile.errors import WorkspaceError
from mkcompile.plan.placement import Placement
from mkcompile.runtime.abi import MAX_WORLD
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.workspace_layout import WorkspaceLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSlots:
    """`slots` for each node, whole messages of `chunk_tiles`; `local_slots` for each other rank of the node.

    `lag`: tiles of every other node before the first own one. Units: offsets in bytes from the start of the region.
    """

    chunk_tiles: int
    slots: int
    lag: int
    local_slots: int
    final_offset: int
    inbox_offset: int
    outbox_offset: int
    final_inbox_offset: int
    final_outbox_offset: int


def network_slots(
    layout: WorkspaceLayout, config: KernelConfig, tiles_per_owner: int, lag: int, chunk_bytes: int
) -> NetworkSlots:
    """As many slots as there are tiles, or rings of as many as fit.

    `lag`: as wanted; 0: all tiles of the other nodes first. Where there is a ring, it and the messages get shorter.
    Raises: WorkspaceError where the tiles outnumber the flags, or not even two messages of one tile fit.
    """
    handled = tiles_per_owner * layout.nodes
    if handled > layout.max_tiles:
        raise WorkspaceError(f"{handled} tiles to be summed by a rank; this workspace has flags for {layout.max_tiles}")
    others, sends_back = layout.nodes - 1, config.broadcast == "staged"
    local_areas = (layout.world - 1) * (2 if sends_back else 1)
    boxes = 2 * others + (others + 1 if sends_back else 0)
    room = layout.region_bytes // config.tile_bytes
    fewest = -(-tiles_per_owner // layout.max_chunks)  # tiles of a message, so that there are flags for all
    chunk_tiles = min(max(fewest, chunk_bytes // config.tile_bytes, 1), tiles_per_owner)
    slots = -(-tiles_per_owner // chunk_tiles) * chunk_tiles
    local_slots = handled
    if local_areas * local_slots + boxes * slots > room:
        share = room / (local_areas * handled + boxes * slots)
        local_slots = min(handled, int(handled * share))
        chunk_tiles = max(fewest, min(chunk_tiles, int(slots * share) // 4))
        slots = min(slots, int(slots * share)) // chunk_tiles * chunk_tiles
        if slots < 2 * chunk_tiles or (layout.world > 1 and local_slots < 2):
            raise WorkspaceError(
                f"{room} tiles of {config.tile_bytes} bytes fit in {layout.region_bytes} bytes of staging, too few for "
                f"{handled} tiles to be summed by a rank; raise MKCOMPILE_ARENA_BYTES"
            )
    lag = min(lag or tiles_per_owner, tiles_per_owner)
    if slots < tiles_per_owner:
        lag = min(lag, slots - chunk_tiles)
    inbox = local_areas * local_slots * config.tile_bytes
    run = others * slots * config.tile_bytes
    return NetworkSlots(
        chunk_tiles=chunk_tiles,
        slots=slots,
        lag=max(lag, min(chunk_tiles, tiles_per_owner)),
        local_slots=local_slots,
        final_offset=(layout.world - 1) * local_slots * config.tile_bytes,
        inbox_offset=inbox,
        outbox_offset=inbox + run,
        final_inbox_offset=inbox + 2 * run,
        final_outbox_offset=inbox + 3 * run,
    )


def wanted_region_bytes(config: KernelConfig, tiles_per_owner: int, shape: tuple[int, int], chunk_bytes: int) -> int:
    """Of each staging region, so that `network_slots` needs no rings. `shape`: nodes, and ranks on each."""
    nodes, world = shape
    areas = (world - 1) * (2 if config.broadcast == "staged" else 1)
    boxes = 2 * (nodes - 1) + (nodes if config.broadcast == "staged" else 0)
    chunk_tiles = max(1, chunk_bytes // config.tile_bytes)
    slots = -(-tiles_per_owner // chunk_tiles) * chunk_tiles
    return (areas * tiles_per_owner * nodes + boxes * slots) * config.tile_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkShape:
    """Where a rank lies: number `local` of `world` on node `node` of `nodes`. Ranks of a group are numbered by node."""

    node: int
    nodes: int
    local: int
    world: int

    def __post_init__(self) -> None:
        if not (0 <= self.node < self.nodes and 0 <= self.local < self.world <= MAX_WORLD):
            raise ValueError(f"no place on nodes: {self}")

    @staticmethod
    def of(placement: Placement, rank: int) -> NetworkShape:
        """The place of a rank of the group."""
        return NetworkShape(
            node=placement.nodes[rank],
            nodes=placement.num_nodes,
            local=placement.rail_of(rank),
            world=placement.per_node,
        )

    def rail_peer(self, node: int) -> int:
        """The rank with the same number on another node, as numbered in the group."""
        return node * self.world + self.local


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkTable:
    """The network as a launch sees it: the proxy's ring in pinned memory, and the rank's place.

    Units: `capacity` commands, a power of two.
    """

    shape: NetworkShape
    ring_control: int
    ring_slots: int
    capacity: int

    def __post_init__(self) -> None:
        if self.capacity & (self.capacity - 1):
            raise ValueError(f"a ring for kernels has a power of two of slots, not {self.capacity}")
