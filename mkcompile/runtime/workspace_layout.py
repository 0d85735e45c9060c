"""Where things lie in a symmetric workspace, the same on every rank; `csrc/abi/workspace.h` is the device's view."""

from __future__ import annotations

from dataclasses import dataclass

from mkcompile.errors import WorkspaceError
from mkcompile.runtime.abi import (
    MAX_NODES,
    MAX_WORLD,
    NETWORK_HEADER_BYTES,
    NUM_FLAG_KINDS,
    NUM_NETWORK_FLAG_KINDS,
    WORKSPACE_HEADER_BYTES,
)
from mkcompile.runtime.kernel_config import KernelConfig

_ALIGNMENT_BYTES = 1024
FLAG_BYTES = 4
#: Flags that the immediates of a counted transport can name. Source: kSlotBits in csrc/host/arrivals.h.
MAX_NETWORK_FLAGS = 1 << 20
# Share of a workspace for words that are data and flag in one, and the most that they may take.
MAILBOX_SHARE = 4
MAILBOX_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingSlots:
    """How one launch divides a staging region: `slots` for each source, then finished tiles.

    Units: `final_offset` bytes from the start of the region.
    """

    slots: int
    final_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceLayout:
    """Header, flags and mailboxes, then two staging regions: launches alternate between mailboxes and between regions.

    `world`: ranks of one node. With more than one of the `nodes` there is a network block (`network_layout.py`) in the
    place of mailboxes.
    Units: `total_bytes` bytes of one rank's workspace; `max_tiles` tiles that one rank may own in a launch.
    Raises: WorkspaceError where nothing is left for staging.
    """

    world: int
    total_bytes: int
    max_tiles: int = 16384
    nodes: int = 1

    def __post_init__(self) -> None:
        if not (self.world <= MAX_WORLD and self.nodes <= MAX_NODES and self.ranks >= 2):
            raise WorkspaceError(f"a workspace joins 2 to {MAX_WORLD} ranks, not {self.world}")
        if self.region_bytes <= 0:
            raise WorkspaceError(f"{self.total_bytes} bytes are too few: flags alone take {self.region_offset}")

    @property
    def ranks(self) -> int:
        """Ranks of all nodes."""
        return self.world * self.nodes

    @property
    def network_offset(self) -> int:
        """Bytes from the workspace's start to the network block."""
        return _aligned(WORKSPACE_HEADER_BYTES + NUM_FLAG_KINDS * self.world * self.max_tiles * FLAG_BYTES)

    @property
    def max_chunks(self) -> int:
        """Network messages of one kind that one rank may get from another in a launch."""
        return min(self.max_tiles // 4, MAX_NETWORK_FLAGS // (2 * NUM_NETWORK_FLAG_KINDS * self.nodes) - 1)

    @property
    def num_network_flags(self) -> int:
        """Flags that the network sets, of both parities; 0 on one node."""
        per_parity = self.nodes * (1 + NUM_NETWORK_FLAG_KINDS * self.max_chunks)
        return 2 * per_parity if self.nodes > 1 else 0

    @property
    def network_flags_offset(self) -> int:
        """Bytes from the workspace's start to those flags."""
        return self.network_offset + NETWORK_HEADER_BYTES

    @property
    def network_counters_offset(self) -> int:
        """Bytes from the workspace's start to the counters of tiles in a chunk."""
        return self.network_flags_offset + self.num_network_flags * FLAG_BYTES

    @property
    def mailbox_offset(self) -> int:
        """Bytes from the workspace's start to the mailboxes of even epochs; those of odd epochs follow."""
        if self.nodes == 1:
            return self.network_offset
        num_counters = NUM_NETWORK_FLAG_KINDS * self.nodes * self.max_chunks
        return _aligned(self.network_counters_offset + num_counters * FLAG_BYTES)

    @property
    def mailbox_bytes(self) -> int:
        """Bytes for each other rank, of each parity."""
        if self.nodes > 1:
            return 0
        all_bytes = min(MAILBOX_BYTES, self.total_bytes // MAILBOX_SHARE)
        return all_bytes // (2 * (self.world - 1)) // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES

    @property
    def region_offset(self) -> int:
        """Bytes from the workspace's start to its first staging region; what lies before must be zero at first."""
        return self.mailbox_offset + 2 * (self.world - 1) * self.mailbox_bytes

    @property
    def region_bytes(self) -> int:
        """Bytes of each of the two regions."""
        return (self.total_bytes - self.region_offset) // 2 // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES

    def require_mailbox(self, config: KernelConfig, tiles: int) -> None:
        """Raises: WorkspaceError where the tiles of a launch do not fit."""
        if tiles * config.tile_bytes > self.mailbox_bytes:
            raise WorkspaceError(
                f"{tiles} tiles of {config.tile_bytes} bytes; the mailboxes hold {self.mailbox_bytes} bytes a rank; "
                f"raise MKCOMPILE_ARENA_BYTES"
            )

    def slots_for(self, config: KernelConfig, tiles_per_owner: int) -> StagingSlots:
        """As many slots as there are tiles, or a ring of as many as fit.

        Raises: WorkspaceError where the tiles outnumber the flags, or not even two slots fit.
        """
        if tiles_per_owner > self.max_tiles:
            raise WorkspaceError(f"{tiles_per_owner} tiles a rank; this workspace has flags for {self.max_tiles}")
        areas = (self.world - 1) * (2 if config.broadcast == "staged" else 1)
        slots = min(tiles_per_owner, self.region_bytes // (areas * config.tile_bytes))
        if slots < min(tiles_per_owner, 2):
            raise WorkspaceError(
                f"{slots} staging slots of {config.tile_bytes} bytes for each of {areas} areas fit in "
                f"{self.region_bytes} bytes; raise MKCOMPILE_ARENA_BYTES"
            )
        return StagingSlots(slots=slots, final_offset=(self.world - 1) * slots * config.tile_bytes)


def _aligned(end: int) -> int:
    return -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
