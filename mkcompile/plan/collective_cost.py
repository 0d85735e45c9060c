"""How long NCCL takes for one collective: a low-latency protocol for small messages, a streaming one above.

Across nodes the NVLink part and the network part of a hierarchical ring overlap; the slower one counts.
Source: `benchmarks/results/2xh200/` for one node of two GPUs; steps, nodes and the network's share are assumptions
that `constants.json` marks as such.
"""

from __future__ import annotations

from math import ceil, log2

from mkcompile.plan.constants import Constants
from mkcompile.plan.topology import Span, Topology

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
_RING_STEPS_MAX = 7


def reduces_in_switch(span: Span, topology: Topology) -> bool:
    """Can the switch add up this group's all-reduce?"""
    return topology.multicast and span.per_node > 2


def nvlink_bytes(kind: str, tensor_bytes: float, span: Span, in_switch: bool = False) -> float:
    """Bytes that each GPU sends inside its node, for the whole tensor's size (gathered, or before the reduction)."""
    others = (span.per_node - 1) / span.per_node
    if kind == "all_reduce":
        return tensor_bytes * ((1 + 1 / span.per_node) if in_switch else 2 * others)
    if kind == "all_to_all":
        return tensor_bytes * (span.per_node - 1) / span.world_size
    return tensor_bytes * others


def network_bytes(kind: str, tensor_bytes: float, span: Span) -> float:
    """Bytes that each GPU sends to other nodes: a node's share is split over its rails."""
    others = (span.num_nodes - 1) / span.num_nodes
    if kind == "all_to_all":
        return tensor_bytes * others
    return tensor_bytes / span.per_node * others * (2 if kind == "all_reduce" else 1)


def latency_us(span: Span, constants: Constants) -> float:
    """What a longer ring or more nodes add to the two-GPU latency."""
    extra_steps = min(span.per_node - 1, _RING_STEPS_MAX) - 1
    hops = ceil(log2(span.num_nodes)) if span.num_nodes > 1 else 0
    return max(extra_steps, 0) * constants.nccl_step_us + hops * constants.nccl_node_us


def nccl_us(kind: str, tensor_bytes: float, span: Span, topology: Topology, constants: Constants) -> float:
    """One collective on a tensor of `tensor_bytes` (the whole one), launch included.

    An all-to-all's `tensor_bytes` is what one rank holds. Units: microseconds.
    """
    if span.world_size == 1 or tensor_bytes <= 0:
        return 0.0
    if topology.gpu.arch == "cpu" or not topology.p2p:
        return _without_p2p_us(kind, tensor_bytes, span, topology, constants)
    # over nodes NCCL was as slow as its rings (docs/planner.md)
    in_switch = reduces_in_switch(span, topology) and span.num_nodes == 1
    sent = nvlink_bytes(kind, tensor_bytes, span, in_switch)
    fraction = {
        "all_reduce": constants.nccl_all_reduce_fraction,
        "reduce_scatter": constants.nccl_reduce_scatter_fraction,
    }.get(kind, constants.nccl_all_gather_fraction)
    low_latency = constants.nccl_ll_us + sent / (topology.nvlink_gbps * constants.nccl_ll_fraction) * 1e-3
    streaming = constants.nccl_simple_us + sent / (topology.nvlink_gbps * fraction) * 1e-3
    # NCCL changes protocol at a size of its own choice and not where the curves cross; the time never falls there
    inside = (
        low_latency
        if sent <= constants.nccl_ll_max_bytes
        else max(streaming, low_latency_at_limit(topology, constants))
    )
    network = _network_us(network_bytes(kind, tensor_bytes, span), topology, constants)
    return max(inside, network) + latency_us(span, constants)


def low_latency_at_limit(topology: Topology, constants: Constants) -> float:
    """The low-latency protocol's time at the largest size that it is used for."""
    gbps = topology.nvlink_gbps * constants.nccl_ll_fraction
    return constants.nccl_ll_us + constants.nccl_ll_max_bytes / gbps * 1e-3


def _network_us(sent_bytes: float, topology: Topology, constants: Constants) -> float:
    if sent_bytes <= 0:
        return 0.0
    return constants.nccl_ll_us + sent_bytes / (topology.nic_gbps * constants.nccl_network_fraction) * 1e-3


def _without_p2p_us(kind: str, tensor_bytes: float, span: Span, topology: Topology, constants: Constants) -> float:
    """Through host memory: two copies for each byte sent."""
    sent = nvlink_bytes(kind, tensor_bytes, span) + network_bytes(kind, tensor_bytes, span)
    gbps = topology.nic_gbps or topology.nvlink_gbps
    return constants.nccl_simple_us + latency_us(span, constants) + 2 * sent / gbps * 1e-3
