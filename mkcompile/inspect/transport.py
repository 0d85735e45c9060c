"""What carries a group's data: NVLink inside a node, the network between nodes, or both."""

from __future__ import annotations

from functools import cache

from mkcompile.config import settings
from mkcompile.errors import ProxyUnavailableError
from mkcompile.plan.topology import Topology
from mkcompile.runtime.machine import PROBE, basis_of
from mkcompile.runtime.proxy.bootstrap import PREFERENCE
from mkcompile.runtime.proxy.trial import try_transport


def transport_of(machine: str, group: str, *, rehearsed: bool) -> str:
    """`NVLink`, `network:rc`, `NVLink + network:rc`: of the group of that name on the machine of that name.

    `rehearsed`: the machine is not this one, so that what this host has says nothing of its network.
    Raises: RuntimeError or KeyError where no group has the name.
    """
    basis = basis_of(machine, group)
    placement = basis.placement
    if placement is None or placement.num_nodes == 1:
        return inside(basis.topology)
    network = f"network{_name(is_here=machine == PROBE and not rehearsed)}"
    return network if placement.per_node == 1 else f"{inside(basis.topology)} + {network}"


def inside(topology: Topology) -> str:
    """What joins the GPUs of a node."""
    return "NVLink" if topology.p2p and topology.gpu.arch != "cpu" else "host memory"


def _name(*, is_here: bool) -> str:
    """The transport that is set, else the best that this host has; nothing where that can't be known."""
    if settings().transport != "auto":
        return f":{settings().transport}"
    return f":{_best()}" if is_here else ""


@cache
def _best() -> str:
    try:
        return next((name for name in PREFERENCE if not try_transport(name).problem), "none")
    except ProxyUnavailableError:
        return "none"
