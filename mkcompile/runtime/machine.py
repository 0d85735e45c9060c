"""Which machine to plan for: what a group's ranks told when the backend was entered, else what this rank sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from mkcompile.config import foreign_settings, settings
from mkcompile.ops.groups import find
from mkcompile.plan.decide import Policy
from mkcompile.plan.kernels import launchable
from mkcompile.plan.topology import Topology, preset
from mkcompile.runtime.abi import MAX_WORLD
from mkcompile.runtime.network_choice import has_queues, network_gbps, transport_of_kernels
from mkcompile.runtime.probe import local_topology
from mkcompile.runtime.published import Basis, Published, local, numbered
from mkcompile.runtime.reserve import FEW_SMS

PROBE = "probe"


def enter(name: str, groups: Sequence[str] = ()) -> None:
    """The backend is entered with a graph that communicates over these groups. All of their ranks come here.

    Where the machine is probed, each group's rank 0 tells the others of it, and all tell on which node they are.

    Raises: OptionError for an unknown name; AbsentRankError for a rank that does not come before the deadline.
    """
    if name != PROBE:
        preset(name)
    elif groups:
        _told_at_entry().of_all([find(one) for one in groups], own_basis)


def basis_of(name: str, group: str | None = None) -> Basis:
    """The machine of that name, what was measured on it, and how the group lies, as all of its ranks know it.

    Asks nobody. Of a group that has not entered the backend that is the machine alone, homogeneous as it is, and ranks
    in order: ranks may have different disks.
    Raises: OptionError for an unknown name.
    """
    found = _process_group(group)
    told = _told_at_entry().known(found) if name == PROBE else None
    if told is not None:
        return told
    topology = _machine(_world_size()) if name == PROBE else preset(name)
    return Basis(topology=topology, placement=None if found is None else numbered(topology, found))


def topology_of(name: str) -> Topology:
    """The machine of that name; for `probe` the GPUs of this host, as often as the ranks need it.

    Without CUDA it is a rehearsal: decisions are those of as many H200s, so that a laptop shows what a node would fuse.
    Raises: OptionError for an unknown name.
    """
    return basis_of(name).topology


def own_basis() -> Basis:
    """What this rank would tell others: the machine, with the measurements on this rank's disk."""
    return local(_machine(_world_size()))


def policy_of() -> Policy:
    """What may be fused there: what kernels exist for, also where a preset stands for a machine that is not here.

    Launches are taken to leave as few SMs as those of most compiled graphs do; a launch decides anew.
    """
    reserve_sms = settings().sm_reserve if settings().is_sm_reserve_given else FEW_SMS
    return Policy(reserve_sms=reserve_sms, available=launchable(settings().launches_block), max_ranks=MAX_WORLD)


@cache
def _told_at_entry() -> Published:
    return Published(topic="entry")


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _process_group(name: str | None) -> ProcessGroup | None:
    """The group of that name, or of all ranks; None where there is none."""
    if not dist.is_initialized():
        return None
    return dist.group.WORLD if name is None else find(name)


@cache
def _machine(world_size: int) -> Topology:
    if not torch.cuda.is_available():
        node = _rehearsed(world_size)
        return node.reaching(-(-world_size // node.gpus_per_node))
    node = local_topology()
    num_nodes = -(-world_size // node.gpus_per_node)
    transport = transport_of_kernels()
    usable = transport if has_queues(transport, foreign_settings().device_queues) else ""
    nic_gbps = network_gbps(transport) or node.nic_gbps
    return replace(node, transport=usable, nic_gbps=nic_gbps).reaching(num_nodes)


def _rehearsed(world_size: int) -> Topology:
    """H200s, as many on a node as torchrun has started ranks there, else all on one."""
    per_node = min(world_size, foreign_settings().ranks_per_node or world_size)
    fitting = next((name for name in ("2xh200", "4xh200") if preset(name).num_gpus >= per_node), "8xh200")
    node = preset(fitting)
    return node if per_node == world_size else replace(node, name=f"{per_node}xh200", gpus_per_node=per_node)
