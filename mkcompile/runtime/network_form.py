"""A call's kernel where its group spans nodes."""

from __future__ import annotations

from dataclasses import replace

from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.network_link import GroupNetwork


def over_nodes(config: KernelConfig, network: GroupNetwork | None) -> KernelConfig:
    """The same kernel over several nodes: one rank on each, or several. Finished tiles of other nodes are staged."""
    if network is None:
        return config
    broadcast = "none" if config.broadcast == "none" else "staged"
    kind = "flat" if network.placement.per_node == 1 else "hierarchical"
    return replace(config, network=kind, broadcast=broadcast, stages=0)  # type: ignore[arg-type]
