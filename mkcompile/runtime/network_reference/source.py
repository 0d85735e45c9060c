"""Which calls go over the network: those on CPU tensors of a group that spans nodes, where a network was named.

`dispatch` asks here before any kernel. None: the call is left to the operator's reference, by what all ranks share.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from mkcompile.config import settings
from mkcompile.errors import PeerTimeoutError, ProxyUnavailableError, TransportError
from mkcompile.ops.all_gather_gemm import AllGatherGemm
from mkcompile.ops.gemm_all_reduce import GemmAllReduce
from mkcompile.ops.gemm_reduce_scatter import GemmReduceScatter
from mkcompile.ops.groups import find
from mkcompile.ops.registry import Call
from mkcompile.plan.placement import Placement
from mkcompile.runtime.exchange import Exchange, is_alone
from mkcompile.runtime.network_reference import operators
from mkcompile.runtime.network_reference.channels import open_channels
from mkcompile.runtime.network_reference.movement import Place
from mkcompile.runtime.node import node_name

_LOG = logging.getLogger(__name__)
_NETWORKS = ("tcp", "rc", "srd", "unordered")


@dataclass(slots=True, kw_only=True)
class _Group:
    """One group: its channels, or why it has none. `lock`: its calls run one after the other."""

    process_group: weakref.ref[ProcessGroup]
    obstacle: str = ""
    place: Place | None = None
    is_joined: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class NetworkReference:
    """All groups of this process. Called with every operator call."""

    def __init__(self, node: Callable[[], str] = node_name) -> None:
        """`node`: the name of the node that this process is on."""
        self._node = node
        self._groups: dict[str, _Group] = {}
        self._lock = threading.Lock()

    def __call__(self, call: Call) -> Any | None:
        """The result, or None where the call is not ours: the same answer on every rank.

        After an error the group's calls are left to the references.
        Raises: PeerLostError and other TransportErrors, PeerTimeoutError, ProxyUnavailableError.
        """
        if not isinstance(call, (GemmReduceScatter, GemmAllReduce, AllGatherGemm)) or not _is_on_cpu(call):
            return None
        group = self._group(call.group)
        with group.lock:  # not one for all: threads of two ranks may come to two groups in different order
            if not group.is_joined:
                self._join(group, call.group)
            if group.place is None:
                return None
            try:
                return _run(call, group.place)
            except operators.TooLargeError as error:
                _LOG.info("%s is left to its reference: %s", call.NAME, error)
                return None
            except (TransportError, PeerTimeoutError) as error:
                self._give_up(group, call.group, str(error))
                raise

    def close(self) -> None:
        """End all proxies; later calls are left to the references."""
        for name, group in self._groups.items():
            with group.lock:
                self._give_up(group, name, "it was closed")

    def _group(self, name: str) -> _Group:
        """The group's state; a new one where the name belongs to another group than before."""
        process_group = find(name)
        with self._lock:
            found = self._groups.get(name)
            if found is None or found.process_group() is not process_group:
                if found is not None:
                    self._give_up(found, name, "the group has ended")
                found = self._groups[name] = _Group(process_group=weakref.ref(process_group))
            return found

    def _join(self, found: _Group, name: str) -> None:
        """Collective."""
        process_group = found.process_group()
        assert process_group is not None
        found.is_joined = True
        if is_alone(process_group):
            found.obstacle = "it has no other ranks"
            return
        exchange = Exchange(process_group, "network", settings().timeout_s)
        placement = Placement.of(exchange.gather("network: nodes", self._node()))
        if placement.num_nodes == 1:
            found.obstacle = "it lies on one node"
        elif not placement.is_even:
            found.obstacle = f"its nodes have different numbers of ranks ({placement})"
            _LOG.warning("operators of group %s are left to their references: %s", name, found.obstacle)
        else:
            try:
                channels = open_channels(process_group, exchange, placement)
            except (TransportError, PeerTimeoutError, ProxyUnavailableError) as error:
                found.obstacle = str(error)
                raise
            found.place = Place(channels=channels, placement=placement)
            _LOG.info("group %s: %s ranks over %s on %s", name, placement, settings().network, channels.proxy.device)

    def _give_up(self, group: _Group, name: str, why: str) -> None:
        """Peers that still wait must see it."""
        if group.place is not None:
            _LOG.warning("operators of group %s are left to their references from now on: %s", name, why)
            group.place.channels.close()
        group.place, group.obstacle = None, why


def network_reference() -> NetworkReference | None:
    """Where `MKCOMPILE_NETWORK` names a network; under `auto` the functional collectives stay."""
    return NetworkReference() if settings().transport in _NETWORKS else None


def _is_on_cpu(call: Call) -> bool:
    tensor: Tensor = call.x if isinstance(call, AllGatherGemm) else call.x[0]  # type: ignore[attr-defined]
    return tensor.device.type == "cpu"


def _run(call: GemmReduceScatter | GemmAllReduce | AllGatherGemm, place: Place) -> Any:
    if isinstance(call, AllGatherGemm):
        return operators.all_gather_gemm(call, place)
    if isinstance(call, GemmAllReduce):
        return operators.gemm_all_reduce(call, place)
    return operators.gemm_reduce_scatter(call, place)
