"""Ranks on several nodes in one process: each with a proxy of its own over the emulated network.

`devices` lists the ranks by node: (0, 1) with two nodes are two GPUs as two nodes; (0, 0, 0, 0) with two nodes are two
nodes of two ranks on one GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from mkcompile.runtime import driver, network_abi
from mkcompile.runtime.faults import error_of
from mkcompile.runtime.kernel import PeerTable
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.network_layout import NetworkShape, NetworkTable
from mkcompile.runtime.proxy import Link, Place, Proxy, ProxyConfig, Region, Ring
from mkcompile.runtime.proxy.cuda import MOST_STREAMS, cuda_hooks, open_engine
from mkcompile.runtime.tile_schedule import LaunchSize, TileSchedule
from mkcompile.runtime.workspace_layout import WorkspaceLayout

from .ranks import RankGroup, RankInput

RING_CAPACITY = 4096
FAST = Link()
#: What the bar is measured with.
LINK_50 = Link(bandwidth_gbps=50.0, latency_us=5.0)
SHUFFLED_50 = Link(bandwidth_gbps=50.0, latency_us=5.0, shuffle_us=20.0, order="shuffled")
SLOW_SHUFFLED = Link(bandwidth_gbps=2.0, latency_us=50.0, shuffle_us=200.0, order="shuffled")


@dataclass(slots=True)
class NodeGroup(RankGroup):
    """Ranks of `nodes` nodes, equally many on each. Close it when its launches have ended."""

    nodes: int = 2
    link: Link = FAST
    timeline_capacity: int = 0
    ring_capacity: int = RING_CAPACITY
    proxies: list[Proxy] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        assert self.world % self.nodes == 0
        RankGroup.__post_init__(self)
        self._connect()

    def make_layout(self) -> WorkspaceLayout:
        """With a network block."""
        return WorkspaceLayout(
            world=self.local_world, nodes=self.nodes, total_bytes=self.arena_bytes, max_tiles=self.max_tiles
        )

    @property
    def local_world(self) -> int:
        """Ranks of a node."""
        return self.world // self.nodes

    @property
    def network(self) -> str:
        """As `KernelConfig` names it."""
        return "flat" if self.local_world == 1 else "hierarchical"

    def peers(self, rank: int, outs: Sequence[torch.Tensor] = ()) -> PeerTable:
        """The table of one rank: the ranks of its node, and its proxy's ring."""
        assert not outs
        first = self._first(rank)
        facts = self.proxies[rank].facts
        return PeerTable(
            rank=rank - first,
            workspaces=tuple(workspace.data_ptr() for workspace in self.workspaces[first : first + self.local_world]),
            layout=self.layout,
            fault_address=self.faults[rank].address,
            timeout_s=self.timeout_s,
            group=tuple(range(first, first + self.local_world)),
            network=NetworkTable(
                shape=NetworkShape(
                    node=rank // self.local_world, nodes=self.nodes, local=rank - first, world=self.local_world
                ),
                ring_control=facts.ring_control,
                ring_slots=facts.ring_slots,
                capacity=self.ring_capacity,
            ),
        )

    def default_schedule(self, config: KernelConfig, given: RankInput, segments: int = 1) -> TileSchedule:
        """All of the other nodes' tiles first."""
        n = given.w.shape[0 if config.weight_layout == "nk" else 1]
        size = LaunchSize(m=given.x.shape[0], n=n, k=given.x.shape[1], world=self.world, segments=segments)
        tiles = size.tiles_per_owner(config) * self.world
        grid = min(self.max_grid(), tiles)
        return TileSchedule(grid=grid, lag=max(1, 2 * grid // max(1, self.local_world - 1)))

    def check(self) -> None:
        """Raises: what any rank's kernels or proxies reported, with ranks as numbered here."""
        for rank in range(self.world):
            self.check_rank(rank)
        for proxy in self.proxies:
            proxy.check()

    def check_rank(self, rank: int) -> None:
        """Raises: what this rank's kernels reported."""
        report = self.faults[rank].report()
        if report.code:
            first = self._first(rank)
            rails = tuple(node * self.local_world + rank - first for node in range(self.nodes))
            raise error_of(report, tuple(range(first, first + self.local_world)), {}, rails)

    def drain(self, limit_s: float = 10.0) -> None:
        """Wait until the proxies have sent all that kernels gave them. Raises: TimeoutError."""
        self.synchronize()
        at = self.layout.network_offset
        end_s = time.monotonic() + limit_s
        for rank, proxy in enumerate(self.proxies):
            given = int(self.workspaces[rank][at : at + 8].view(torch.int64).item())
            while proxy.counters()["completions"] < given:
                proxy.check()
                if time.monotonic() > end_s:
                    raise TimeoutError(f"rank {rank}: {given} commands, {proxy.counters()}")

    def close(self) -> None:
        """End the proxies. Raises: TransportError, TimeoutError."""
        try:
            self.drain()
        finally:
            for proxy in self.proxies:
                proxy.close(1.0)

    def _first(self, rank: int) -> int:
        """The first rank of a rank's node."""
        return rank // self.local_world * self.local_world

    def _connect(self) -> None:
        bases = tuple(workspace.data_ptr() for workspace in self.workspaces)
        config = ProxyConfig(
            transport="emulated", link=self.link, ring_capacity=self.ring_capacity,
            timeline_capacity=self.timeline_capacity,
        )  # fmt: skip
        ranks = tuple(range(self.world))
        for rank, device in enumerate(self.devices):
            region = Region(
                address=bases[rank], size_bytes=self.arena_bytes, flags_offset_bytes=self.layout.network_flags_offset,
                num_flags=self.layout.num_network_flags, is_cuda=True, keep=self.workspaces[rank],
            )  # fmt: skip
            ring = Ring(
                control=driver.allocate_mapped(network_abi.RING_CONTROL_BYTES, device),
                slots=driver.allocate_mapped(network_abi.COMMAND_BYTES * self.ring_capacity, device),
            )
            place = Place(rank=rank, ranks=ranks, timeout_s=self.timeout_s)
            # of 32 queues a rank takes three: its own, its mover's, and the proxy's
            streams = MOST_STREAMS if self.devices.count(device) == 1 else 1
            hooks = cuda_hooks(open_engine(device, streams), bases)
            self.proxies.append(Proxy(place, region, config, hooks, ring))
        for rank, proxy in enumerate(self.proxies):
            for peer in ranks:
                if peer != rank:
                    proxy.connect(peer, self.proxies[peer].endpoint(rank))
        for proxy in self.proxies:
            proxy.finish()
            proxy.start()


@contextmanager
def node_group(devices: Sequence[int], nodes: int, link: Link = FAST, arena_bytes: int = 96 << 20, **others: float
) -> Iterator[NodeGroup]:  # fmt: skip
    """A group that is closed at the end, also after a failure."""
    group = NodeGroup(tuple(devices), arena_bytes=arena_bytes, nodes=nodes, link=link, **others)  # type: ignore[arg-type]
    try:
        yield group
    except BaseException:
        for proxy in group.proxies:
            proxy.close(0.5)
        raise
    group.close()
