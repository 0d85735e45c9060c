"""Which machine to plan for: what rank 0 told when the backend was entered, else what this rank sees of it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import torch.distributed as dist

from mkcompile.config import settings
from mkcompile.plan.decide import Policy
from mkcompile.plan.topology import Topology, preset
from mkcompile.runtime.probe import local_topology
from mkcompile.runtime.published import Basis, Published, local
from mkcompile.runtime.reserve import FEW_SMS
from mkcompile.runtime.tactics import AVAILABLE

PROBE = "probe"


def enter(name: str) -> None:
    """The backend is entered: where the machine is probed, rank 0 tells the others of it. All ranks come here.

    Raises: OptionError for an unknown name; AbsentRankError where rank 0 does not come before the deadline.
    """
    if name != PROBE:
        preset(name)
    elif dist.is_initialized():
        group = dist.group.WORLD
        assert group is not None
        _told_at_entry().of(group, own_basis)


def basis_of(name: str) -> Basis:
    """The machine of that name and what was measured on it, as far as all ranks know it; asks nobody.

    Before the backend was entered that is the machine alone, homogeneous as it is: ranks may have different disks.
    Raises: OptionError for an unknown name.
    """
    if name != PROBE:
        return Basis(topology=preset(name))
    group = dist.group.WORLD if dist.is_initialized() else None
    told = _told_at_entry().known(group)
    return Basis(topology=_machine(1 if group is None else group.size())) if told is None else told


def topology_of(name: str) -> Topology:
    """The machine of that name; for `probe` the GPUs of this host, as often as the ranks need it.

    Without CUDA it is a rehearsal: decisions are those of as many H200s, so that a laptop shows what a node would fuse.
    Raises: OptionError for an unknown name.
    """
    return basis_of(name).topology


def own_basis() -> Basis:
    """What this rank would tell others: the machine, with the measurements on this rank's disk."""
    return local(_machine(dist.get_world_size() if dist.is_initialized() else 1))


def policy_of(name: str) -> Policy:
    """What may be fused there: on this host's GPUs what kernels exist for, elsewhere what the planner knows.

    Launches are taken to leave as few SMs as those of most compiled graphs do; a launch decides anew.
    """
    is_here = name == PROBE and torch.cuda.is_available()
    reserve_sms = settings().sm_reserve if settings().is_sm_reserve_given else FEW_SMS
    return Policy(reserve_sms=reserve_sms, available=AVAILABLE if is_here else None)


@cache
def _told_at_entry() -> Published:
    return Published(topic="entry")


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
