"""What joins a group's workspace to the other nodes: a proxy, its ring in pinned memory, and the place of this rank."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from mkcompile.errors import MkcompileError, ProxyUnavailableError, TransportError
from mkcompile.plan.placement import Placement
from mkcompile.runtime import driver, network_abi
from mkcompile.runtime.exchange import Exchange
from mkcompile.runtime.network_choice import proxy_config
from mkcompile.runtime.network_layout import NetworkShape, NetworkTable
from mkcompile.runtime.node import EMULATED
from mkcompile.runtime.proxy import Hooks, Local, Proxy, ProxyConfig, Region, Ring, connect, with_nic
from mkcompile.runtime.proxy.bootstrap import NIC_TRANSPORTS
from mkcompile.runtime.proxy.cuda import MOST_STREAMS, CudaEngine, cuda_hooks, exported, open_engine
from mkcompile.runtime.symmetric import SymmetricBuffer
from mkcompile.runtime.workspace_layout import WorkspaceLayout

_LOG = logging.getLogger(__name__)
#: Pinned memory for each peer where the network can't reach the GPU's: half for what leaves, half for what comes.
_BOUNCE_BYTES_A_PEER = 2 << 20
_GOODBYE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLink:
    """Of one workspace. Its launches must have ended, here and on the peers, before it is closed.

    `calls_driver`: CUDA's, to copy or to store flags, while launches wait.
    """

    table: NetworkTable
    check: Callable[[], None]
    close: Callable[[], None]
    counters: Callable[[], dict[str, int]]
    calls_driver: bool

    def state(self) -> str:
        """What the proxy of this rank has done, for whoever finds that a kernel has waited in vain."""
        try:
            found = self.counters()
        except MkcompileError:  # closed since by another thread
            return "this rank's proxy has been closed"
        longest_ms = found["longest_round"] / 1e6
        return (
            f"this rank's proxy has taken {found['commands']} commands, sent {found['completions']} and published "
            f"{found['arrivals']} arrivals in {found['rounds']} rounds, of which the longest took {longest_ms:.0f} ms"
        )

    def failure(self) -> MkcompileError | None:
        """What has ended the proxy, if anything has; without its traceback, which would keep the proxy's memory."""
        try:
            self.check()
        except TransportError as error:
            return error.with_traceback(None)
        return None


Opener = Callable[[Exchange, SymmetricBuffer, WorkspaceLayout], NetworkLink]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNetwork:
    """A group over several nodes: where its ranks lie, and how a workspace of it gets its link (collective)."""

    placement: Placement
    open: Opener

    def members(self, rank: int) -> tuple[int, ...]:
        """The ranks of a rank's node."""
        return self.placement.members(self.placement.nodes[rank])


@dataclass(slots=True, kw_only=True)
class _Pinned:
    """Pinned memory, freed once the proxy that uses it has ended."""

    device_idx: int
    addresses: list[int] = field(default_factory=list)

    def take(self, size_bytes: int) -> int:
        self.addresses.append(driver.allocate_mapped(size_bytes, self.device_idx))
        return self.addresses[-1]

    def free(self) -> None:
        while self.addresses:
            driver.free_mapped(self.addresses.pop(), self.device_idx)


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaLinks:
    """Opens links for workspaces on a CUDA device. `transport`: what all ranks of the group have agreed on."""

    device_idx: int
    transport: str
    placement: Placement

    def __call__(self, exchange: Exchange, buffer: SymmetricBuffer, layout: WorkspaceLayout) -> NetworkLink:
        """Collective. Raises: TransportError, ProxyUnavailableError, PeerTimeoutError, on all ranks."""
        group = exchange.group()
        assert group is not None
        pinned, brought, failure = _Pinned(device_idx=self.device_idx), None, ""
        try:
            brought = self._bring(exchange, buffer, layout, pinned)
        except MkcompileError as error:
            failure = str(error)
        try:
            exchange.agree("network: ready", failure, ProxyUnavailableError, "host proxy")
            assert brought is not None
            local, config = brought
            proxy = connect(group, local, config, exchange.timeout_s)
        except MkcompileError:
            pinned.free()
            raise
        _LOG.info("group of ranks %s: %s over %s", exchange.ranks, self.placement, proxy.device)
        table = NetworkTable(
            shape=NetworkShape.of(self.placement, exchange.rank),
            ring_control=local.ring.control,
            ring_slots=local.ring.slots,
            capacity=config.ring_capacity,
        )
        return NetworkLink(
            table=table,
            check=proxy.check,
            close=lambda: _close(proxy, pinned),
            counters=proxy.counters,
            calls_driver=config.transport not in NIC_TRANSPORTS
            or proxy.counts
            or proxy.registration == "bounce buffer",
        )

    def _bring(
        self, exchange: Exchange, buffer: SymmetricBuffer, layout: WorkspaceLayout, pinned: _Pinned
    ) -> tuple[Local, ProxyConfig]:
        """What this rank needs before it meets the others. Raises: MkcompileError of any kind, on this rank alone."""
        config = with_nic(proxy_config(self.transport), torch.device("cuda", self.device_idx))
        ring = Ring(
            control=pinned.take(network_abi.RING_CONTROL_BYTES),
            slots=pinned.take(network_abi.COMMAND_BYTES * config.ring_capacity),
        )
        region = Region(
            address=buffer.addresses[exchange.rank],
            size_bytes=buffer.size_bytes,
            flags_offset_bytes=layout.network_flags_offset,
            num_flags=layout.num_network_flags,
            is_cuda=True,
            keep=buffer,
        )
        engine = open_engine(self.device_idx, MOST_STREAMS if self.transport == EMULATED else 1)
        hooks = self._hooks(engine, buffer, exchange.world_size, pinned)
        reachable = exported(engine, region) if config.transport in NIC_TRANSPORTS else region
        return Local(region=reachable, hooks=hooks, ring=ring), config

    def _hooks(self, engine: CudaEngine, buffer: SymmetricBuffer, world_size: int, pinned: _Pinned) -> Hooks:
        if self.transport == EMULATED:
            return cuda_hooks(engine, buffer.addresses)
        bounce_bytes = world_size * _BOUNCE_BYTES_A_PEER if self.transport == "tcp" else 0
        bounce = pinned.take(bounce_bytes) if bounce_bytes else 0
        return cuda_hooks(engine, bounce_base=bounce, bounce_bytes=bounce_bytes)


def _close(proxy: Proxy, pinned: _Pinned) -> None:
    """Peers that have come to the same call have sent all that they had to; one that is gone has not."""
    try:
        proxy.close(_GOODBYE_S)
    except TransportError as error:
        _LOG.info("the proxy ended with %s", error)
    pinned.free()
