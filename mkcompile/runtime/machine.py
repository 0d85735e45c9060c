"""Which machine to plan for. Every rank answers by itself, from what it sees of a homogeneous machine."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import torch.distributed as dist

from mkcompile.config import settings
from mkcompile.plan.decide import Policy
from mkcompile.plan.topology import Topology, preset
from mkcompile.runtime.probe import local_topology
from mkcompile.runtime.tactics import AVAILABLE

PROBE = "probe"


def topology_of(name: str) -> Topology:
    """The machine of that name; for `probe` the GPUs of this host, as often as the ranks need it.

    Without CUDA it is a rehearsal: decisions are those of as many H200s, so that a laptop shows what a node would fuse.
    Raises: OptionError for an unknown name.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    return preset(name) if name != PROBE else _machine(world_size)


def policy_of(name: str) -> Policy:
    """What may be fused there: on this host's GPUs what kernels exist for, elsewhere what the planner knows."""
    is_here = name == PROBE and torch.cuda.is_available()
    return Policy(reserve_sms=settings().sm_reserve, available=AVAILABLE if is_here else None)


@cache
def _machine(world_size: int) -> Topology:
    if not torch.cuda.is_available():
        fitting = next((name for name in ("2xh200", "4xh200") if preset(name).num_gpus >= world_size), "8xh200")
        node = preset(fitting)
    else:
        node = local_topology()
    num_nodes = -(-world_size // node.gpus_per_node)
    if num_nodes <= 1:
        return node
    nic_gbps = node.nic_gbps or preset("8xh200").nic_gbps
    return replace(node, name=f"{num_nodes}x{node.name}", num_nodes=num_nodes, nic_gbps=nic_gbps)
