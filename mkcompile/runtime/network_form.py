"""What the launcher does where a group spans nodes: the calls' kernels, and whether there is a network at all."""

from __future__ import annotations

from dataclasses import replace

from mkcompile.errors import TransportError, UnsupportedDeviceError, WorkspaceError
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.network_link import GroupNetwork
from mkcompile.runtime.workspace import Demand, GroupWorkspace


def over_nodes(config: KernelConfig, network: GroupNetwork | None) -> KernelConfig:
    """The same kernel over several nodes: one rank on each, or several. Finished tiles of other nodes are staged."""
    if network is None:
        return config
    broadcast = "none" if config.broadcast == "none" else "staged"
    kind = "flat" if network.placement.per_node == 1 else "hierarchical"
    return replace(config, network=kind, broadcast=broadcast, stages=0)  # type: ignore[arg-type]


def connect_nodes(workspace: GroupWorkspace) -> str:
    """Collective: why the network can't be had, alike on all ranks; empty if it can, or if the group needs none.

    Raises: PeerTimeoutError for ranks that do not come.
    """
    if workspace.network is None:
        return ""
    try:
        workspace.renew(Demand(tiles=1, region_bytes=0))
    except (TransportError, UnsupportedDeviceError, WorkspaceError) as error:
        return str(error)
    return ""
