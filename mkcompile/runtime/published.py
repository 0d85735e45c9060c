"""What this process plans from: topology and measurements, told by rank 0 of a group, the same on all of its ranks.

Told when the backend is entered, for what is compiled, and at the first launch of a group, for what is launched: a
compile cache's hit runs no pass, but it does both.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _get_process_group_store

from mkcompile.config import settings
from mkcompile.plan.decide import Policy
from mkcompile.plan.disk import Results, load_results
from mkcompile.plan.exchange import Ranks
from mkcompile.plan.publish import publish
from mkcompile.plan.table import PlanTable
from mkcompile.plan.topology import Topology
from mkcompile.runtime.exchange import group_timeout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """A machine, and what `tune` has measured on it."""

    topology: Topology
    tuned: Results = field(default_factory=Results)
    _tables: dict[Policy, PlanTable] = field(default_factory=dict)

    def table(self, policy: Policy) -> PlanTable:
        """The table of a policy; always the same one."""
        if policy not in self._tables:
            self._tables[policy] = PlanTable(topology=self.topology, policy=policy, tuned=self.tuned)
        return self._tables[policy]


@dataclass(slots=True)
class Published:
    """What rank 0 of each group has told, for one purpose (`topic`). Each life of a group is told anew."""

    topic: str
    _told: list[tuple[weakref.ref[ProcessGroup], Basis]] = field(default_factory=list)

    def known(self, group: ProcessGroup | None) -> Basis | None:
        """What was told to this group; asks nobody."""
        return next((basis for ref, basis in self._told if group is not None and ref() is group), None)

    def of(self, group: ProcessGroup, own: Callable[[], Basis]) -> Basis:
        """Rank 0's basis; `own` is called on rank 0 alone. All ranks of the group come here.

        Raises: AbsentRankError where rank 0 does not come before the deadline.
        """
        basis = self.known(group)
        if basis is None:
            basis = own() if is_alone(group) else _ask(group, self.topic, own)
            self._told = [(ref, one) for ref, one in self._told if ref() is not None]
            self._told.append((weakref.ref(group), basis))
        return basis


def is_alone(group: ProcessGroup) -> bool:
    """Is there nobody to ask? A fake group's other ranks do not exist."""
    return group.size() == 1 or dist.get_backend(group) == "fake"


def _ask(group: ProcessGroup, topic: str, own: Callable[[], Basis]) -> Basis:
    store: Store = PrefixStore(f"mkcompile/{topic}", _get_process_group_store(group))
    # a store can outlive a group of the same name: each life counts by itself
    life = str(store.add(f"life/{group.rank()}", 1))
    ranks = Ranks(
        rank=group.rank(),
        world_size=group.size(),
        store=PrefixStore(life, store),
        timeout_s=settings().timeout_s or group_timeout_s(group),
        name="plan",
    )
    topology, tuned = publish(ranks, own)
    return Basis(topology=topology, tuned=tuned)


def local(topology: Topology) -> Basis:
    """The machine with what this rank's disk says of it."""
    return Basis(topology=topology, tuned=load_results(topology))
