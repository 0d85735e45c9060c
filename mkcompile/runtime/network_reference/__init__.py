"""The operators over several nodes on the CPU: our own proxy moves the chunks, ATen multiplies and adds.

The movement is that of the kernels: sums inside a node first, one rank of each node exchanges with its rail peers,
shards go once to each node and on in a ring.
"""

from __future__ import annotations

from mkcompile.runtime.network_reference.source import NetworkReference, network_reference

__all__ = ["NetworkReference", "network_reference"]
