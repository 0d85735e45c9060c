"""The workspace of a group on this rank: made at the first launch, and anew when it is too small or has failed.

What decides when it is made, and how large, is the same on every rank: the sizes of the launches, the cap and the order
of the calls. So all ranks come to the handshake of a new workspace at the same call.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field

from mkcompile.errors import WorkspaceError
from mkcompile.runtime.chain import LaunchChain
from mkcompile.runtime.exchange import Exchange
from mkcompile.runtime.faults import FaultBoard, FaultSlot
from mkcompile.runtime.kernel import PeerTable
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.network_layout import NetworkShape, wanted_region_bytes
from mkcompile.runtime.network_link import GroupNetwork, NetworkLink
from mkcompile.runtime.results import Results
from mkcompile.runtime.symmetric import ABOUT, Backing, SymmetricBuffer, make_buffer
from mkcompile.runtime.tile_schedule import LaunchSize, TileSchedule
from mkcompile.runtime.workspace_layout import MAILBOX_BYTES, MAILBOX_SHARE, WorkspaceLayout

_LOG = logging.getLogger(__name__)
WARM_UP_FIRST = "warm up first: run the same function once, with the same shapes, before the capture"
_SMALLEST_BYTES = 64 << 20
_SMALLEST_TILES = 16384
# More than a region loses to alignment.
_ROUNDING_BYTES = 1 << 16
# Tiles in flight beyond the lag that a ring of slots must hold. Source: docs/decisions/302-reduce-scatter-order.md.
_WAVES_IN_FLIGHT = 2
_NO_MEMORY = SymmetricBuffer(addresses=(), size_bytes=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a launch wants of its workspace.

    Units: `region_bytes` bytes of each staging region, for full speed; `mailbox_bytes` bytes of each rank's mailbox.
    """

    tiles: int
    region_bytes: int
    mailbox_bytes: int = 0

    @staticmethod
    def of(config: KernelConfig, schedule: TileSchedule, size: LaunchSize, nodes: int = 1) -> Demand:
        """The ring of slots that never makes a sender wait for a receiver that keeps up; or mailboxes for all tiles;
        over several nodes slots for all tiles.
        """
        if config.streams:
            return Demand(tiles=1, region_bytes=0, mailbox_bytes=size.tiles(config) * config.tile_bytes)
        tiles = size.tiles_per_owner(config)
        if nodes > 1:
            shape = nodes, size.world // nodes
            region_bytes = wanted_region_bytes(config, tiles, shape, schedule.chunk_bytes)
            return Demand(tiles=tiles * nodes, region_bytes=region_bytes)
        slots = min(tiles, schedule.lag + _WAVES_IN_FLIGHT * schedule.grid)
        areas = (size.world - 1) * (2 if config.broadcast == "staged" else 1)
        return Demand(tiles=tiles, region_bytes=areas * slots * config.tile_bytes)

    def joined(self, other: Demand) -> Demand:
        """What serves both launches."""
        return Demand(
            tiles=max(self.tiles, other.tiles),
            region_bytes=max(self.region_bytes, other.region_bytes),
            mailbox_bytes=max(self.mailbox_bytes, other.mailbox_bytes),
        )


def layout_for(
    world: int, demand: Demand, cap_bytes: int, current: WorkspaceLayout | None, nodes: int = 1
) -> WorkspaceLayout:
    """The current layout where it serves, else one that doubles until it does, up to the cap. `world`: ranks of a node.

    A demand beyond the cap gets the cap: a launch then has fewer slots, or raises where that is too few.
    """
    if current is not None and current.max_tiles >= demand.tiles:
        fits = current.region_bytes >= demand.region_bytes and current.mailbox_bytes >= demand.mailbox_bytes
        if fits or current.total_bytes >= cap_bytes:
            return current
    max_tiles = max(_SMALLEST_TILES, _power_of_two(demand.tiles), current.max_tiles if current else 0)
    region_bytes = max(demand.region_bytes, current.region_bytes if current else 0)
    flags_bytes = WorkspaceLayout(world=world, total_bytes=1 << 62, max_tiles=max_tiles, nodes=nodes).mailbox_offset
    mailboxes_bytes = 2 * (world - 1) * max(demand.mailbox_bytes, current.mailbox_bytes if current else 0)
    regions_bytes = flags_bytes + MAILBOX_BYTES + 2 * (region_bytes + _ROUNDING_BYTES)
    wanted_bytes = _power_of_two(max(regions_bytes, MAILBOX_SHARE * mailboxes_bytes))
    total_bytes = min(max(_SMALLEST_BYTES, wanted_bytes), cap_bytes)
    if total_bytes <= flags_bytes + total_bytes // MAILBOX_SHARE:
        raise WorkspaceError(
            f"a workspace of {cap_bytes} bytes is too small: its flags take {flags_bytes}; raise MKCOMPILE_ARENA_BYTES"
        )
    return WorkspaceLayout(world=world, total_bytes=total_bytes, max_tiles=max_tiles, nodes=nodes)


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


@dataclass(slots=True, kw_only=True, eq=False)
class Workspace:
    """One workspace of all ranks, its fault report, and the results that peers store into while it is in use. `link`:
    to the other nodes, where there are several.

    `captured`: a CUDA graph may use it, so it is never freed.
    """

    layout: WorkspaceLayout
    buffer: SymmetricBuffer
    slot: FaultSlot
    results: Results
    link: NetworkLink | None = None
    captured: bool = False

    @property
    def is_held(self) -> bool:
        """Its launches wait for a proxy that calls the driver, and the host waits for them. Asked by any thread, while
        another one may close the link.
        """
        link = self.link
        return link is not None and link.calls_driver

    def close_link(self) -> None:
        """What a kernel has reported still says what ended the proxy, and not that it was closed."""
        link, self.link = self.link, None
        if link is not None:
            failure = link.failure()
            self.slot.network_failure, state = lambda: failure, link.state()
            self.slot.network_state = lambda: state
            link.close()

    def let_go(self) -> None:
        """Of the memory: operations that are not called any more may hold the workspace for long."""
        self.buffer, self.link = _NO_MEMORY, None


@dataclass(slots=True, kw_only=True)
class GroupWorkspace:
    """The workspaces of one group. `network`: where it spans nodes. Units: `cap_bytes` bytes of the one in use, results
    included.

    Results of earlier ones stay until the last tensor there has gone.
    """

    exchange: Exchange
    backing: Backing
    board: FaultBoard
    chain: LaunchChain
    cap_bytes: int
    network: GroupNetwork | None = None
    current: Workspace | None = None
    _kept: list[Workspace] = field(default_factory=list)
    _leaving: list[Results] = field(default_factory=list)

    @property
    def held_bytes(self) -> int:
        """Bytes of symmetric memory on this rank, those kept for captured graphs included."""
        held = self._in_use()
        results = [*self._leaving, *(one.results for one in held)]
        return sum(one.buffer.size_bytes for one in held) + sum(one.held_bytes for one in results)

    def _in_use(self) -> list[Workspace]:
        """With those kept for captured graphs. Another thread may replace or close the current one meanwhile."""
        current = self.current
        return self._kept.copy() if current is None else [*self._kept, current]

    def require(self, demand: Demand, stream: int, capturing: bool) -> Workspace:
        """The workspace for a launch that has entered the chain with the stream. Where a new one is needed that is
        collective, and the chain is left meanwhile.

        Raises: WorkspaceError where a new one is needed while a CUDA graph is captured, or can't be had;
        PeerTimeoutError for ranks that do not come; UnsupportedDeviceError.
        """
        while self._lacks(demand):
            if capturing:
                raise WorkspaceError(
                    f"a CUDA graph is being captured and this call needs a new workspace; {WARM_UP_FIRST}"
                )
            with self.chain.left(stream):
                self.renew(demand)
        current = self.current
        assert current is not None
        current.captured = current.captured or capturing
        return current

    @property
    def is_held(self) -> bool:
        """Do launches, those of captured graphs included, wait for a proxy that calls the driver?"""
        return any(one.is_held for one in self._in_use())

    def renew(self, demand: Demand) -> None:
        """Have a workspace that serves. Collective where there is none; outside of the chain. Raises: as `require`."""
        with self.exchange.meeting:
            if self._lacks(demand):
                self._replace(self.layout(demand))

    def _lacks(self, demand: Demand) -> bool:
        current = self.current
        return current is None or current.slot.failed or self.layout(demand) is not current.layout

    def layout(self, demand: Demand) -> WorkspaceLayout:
        """What `require` would take."""
        current = self.current.layout if self.current is not None else None
        return layout_for(self.node_world, demand, self.cap_bytes, current, self.nodes)

    @property
    def nodes(self) -> int:
        """Nodes of the group."""
        return self.network.placement.num_nodes if self.network is not None else 1

    @property
    def node_world(self) -> int:
        """Ranks of a node."""
        return self.exchange.world_size // self.nodes

    def close(self) -> None:
        """The group is gone: give everything back but what captured graphs may use, or somebody reads. Idempotent, and
        goes on where an error has ended it.
        """
        with self.chain.lock:
            old, self.current = self.current, None
        try:
            if old is not None:
                self._retire(old)
                old = None
        finally:
            self.current = old
        self._leaving = [one for one in self._leaving if not one.let_go()]

    def peers(self, workspace: Workspace) -> PeerTable:
        """The ranks as a launch sees them: those of this node."""
        members, link = self._members(), workspace.link
        return PeerTable(
            rank=members.index(self.exchange.rank),
            workspaces=tuple(workspace.buffer.addresses[rank] for rank in members),
            layout=workspace.layout,
            fault_address=workspace.slot.address,
            timeout_s=self.exchange.timeout_s,
            multicast=workspace.buffer.multicast,
            group=self._numbers(members),
            network=None if link is None else link.table,
        )

    def _members(self) -> tuple[int, ...]:
        """The group's ranks on this node."""
        if self.network is None:
            return tuple(range(self.exchange.world_size))
        return self.network.members(self.exchange.rank)

    def _numbers(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """As the whole job numbers them."""
        return tuple(self.exchange.ranks[rank] for rank in ranks)

    def _rails(self) -> tuple[int, ...]:
        """The rail peer on each node, this rank included."""
        if self.network is None:
            return ()
        shape = NetworkShape.of(self.network.placement, self.exchange.rank)
        return self._numbers(shape.rail_peer(node) for node in range(shape.nodes))

    def _replace(self, layout: WorkspaceLayout) -> None:
        step = f"workspace of {layout.total_bytes >> 20} MiB"
        members = self._members()
        with ExitStack() as undo:
            slot = self._claim(undo, step, members)
            buffer = make_buffer(self.exchange, self.backing, step, layout.total_bytes, layout.region_offset, members)
            link = None if self.network is None else self.network.open(self.exchange, buffer, layout)
            undo.pop_all()
        if link is not None:
            slot.network_failure, slot.network_state = link.failure, link.state
        results = Results(self.exchange, self.backing, self.chain, self.cap_bytes - layout.total_bytes)
        new = Workspace(layout=layout, buffer=buffer, slot=slot, results=results, link=link)
        with self.chain.lock:  # from here on nothing is launched on the one before
            old, self.current = self.current, new
        if old is not None and self._is_done_with(old, step):
            self._retire(old)
        _LOG.info("group of ranks %s: %s", self.exchange.ranks, step)

    def _claim(self, undo: ExitStack, step: str, members: tuple[int, ...]) -> FaultSlot:
        """Where the launches will report; `undo` gives it back. Collective.

        Raises: WorkspaceError where one rank has no place left.
        """
        slot, failure = None, ""
        try:
            slot = self.board.claim(self._numbers(members), self._rails())
            undo.callback(self.board.release, slot)
        except WorkspaceError as error:
            failure = str(error)
        self.exchange.agree(f"{step}: a place for reports", failure, WorkspaceError, ABOUT)
        assert slot is not None
        return slot

    def _is_done_with(self, old: Workspace, step: str) -> bool:
        """Over nodes: collective. Whether no rank uses the workspace any more or maps it, so that all can free theirs.

        The ranks have come to the same call, but the last launch may be done here and still write from elsewhere. What
        a rank's graphs use is kept by all; so is the memory if a rank does not come any more.
        """
        if self.network is None:  # torch's memory stays as long as anyone maps it
            return True
        self._kept.append(old)
        self.backing.settle()
        ended = self.exchange.gather(f"{step}: launches before it have ended", "captured" if old.captured else "")
        if any(ended):
            return False
        old.close_link()
        old.buffer.unmap()
        self.exchange.gather(f"{step}: the one before it is unmapped", "")
        self._kept.remove(old)
        return True

    def _retire(self, old: Workspace) -> None:
        if old.captured:
            self._kept.append(old)
            return
        # The ranks have come to the same call or the group has ended: what the device still does can end by itself.
        self.backing.settle()
        old.close_link()
        self.board.release(old.slot)
        self._leaving = [one for one in (*self._leaving, old.results) if not one.let_go()]
        old.let_go()
