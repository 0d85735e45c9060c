"""What this process plans from: topology and measurements, told by rank 0 of a group, and the node of each rank.
The same on all ranks of the group.

Told when the backend is entered, for what is compiled, and at the first launch of a group, for what is launched: a
compile cache's hit runs no pass, but it does both. Each group by itself: other ranks of the job may be elsewhere, as
the stages of a pipeline are.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch.distributed as dist
from torch.distributed import ProcessGroup

from mkcompile.config import settings
from mkcompile.plan.decide import Policy
from mkcompile.plan.disk import Results, load_results
from mkcompile.plan.exchange import Ranks
from mkcompile.plan.placement import Placement
from mkcompile.plan.publish import hear, say
from mkcompile.plan.table import PlanTable
from mkcompile.plan.topology import Topology
from mkcompile.runtime.exchange import group_timeout_s, is_alone, own_store
from mkcompile.runtime.node import node_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """A machine, what `tune` has measured on it, and how the group lies there (None: as consecutive ranks do)."""

    topology: Topology
    tuned: Results = field(default_factory=Results)
    placement: Placement | None = None
    _tables: dict[Policy, PlanTable] = field(default_factory=dict)

    def table(self, policy: Policy) -> PlanTable:
        """The table of a policy; always the same one."""
        if policy not in self._tables:
            self._tables[policy] = PlanTable(topology=self.topology, policy=policy, tuned=self.tuned)
        return self._tables[policy]


@dataclass(slots=True)
class _Asked:
    """A place in the store for one life of a group: who tries again after an absent rank meets the others there.

    What this rank says there it says once, for ranks that have heard it do not ask again.
    """

    group: weakref.ref[ProcessGroup]
    ranks: Ranks
    said: str | None = None


@dataclass(slots=True)
class Published:
    """What each group's ranks have told, for one purpose (`topic`). Each life of a group is told anew."""

    topic: str
    _told: list[tuple[weakref.ref[ProcessGroup], Basis]] = field(default_factory=list)
    _asked: list[_Asked] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def known(self, group: ProcessGroup | None) -> Basis | None:
        """What was told to this group; asks nobody."""
        return next((basis for ref, basis in self._told if group is not None and ref() is group), None)

    def of(self, group: ProcessGroup, own: Callable[[], Basis]) -> Basis:
        """Rank 0's basis; `own` is called on rank 0 alone. All ranks of the group come here.

        Raises: AbsentRankError for a rank that does not come before the deadline.
        """
        self.of_all([group], own)
        basis = self.known(group)
        assert basis is not None
        return basis

    def of_all(self, groups: Sequence[ProcessGroup], own: Callable[[], Basis]) -> None:
        """The same for several groups: all are told before any is waited for, so that their order does not matter.

        Raises: AbsentRankError for a rank that does not come before the deadline.
        """
        new = [group for group in groups if self.known(group) is None]
        asked = [(group, *self._said(group, own)) for group in new if not is_alone(group)]
        for group in new:
            if is_alone(group):
                basis = own()
                self._keep(group, replace(basis, placement=numbered(basis.topology, group)))
        for group, ranks, said in asked:
            told = hear(ranks, said)
            self._keep(group, Basis(topology=told.topology, tuned=told.tuned, placement=told.placement))

    def _said(self, group: ProcessGroup, own: Callable[[], Basis]) -> tuple[Ranks, str]:
        """Where the group's ranks meet, and what this one has said there."""
        with self._lock:  # a thread that comes meanwhile says nothing else
            one = next((one for one in self._asked if one.group() is group), None)
            if one is None:
                one = _Asked(group=weakref.ref(group), ranks=_ranks(group, self.topic))
                self._asked = [*(old for old in self._asked if old.group() is not None), one]
            if one.said is None:
                one.said = say(one.ranks, node_name(), own)
            return one.ranks, one.said

    def _keep(self, group: ProcessGroup, basis: Basis) -> None:
        with self._lock:  # other threads keep what other groups were told
            self._told = [*((ref, one) for ref, one in self._told if ref() is not None), (weakref.ref(group), basis)]


def numbered(topology: Topology, group: ProcessGroup) -> Placement:
    """How a group lies where the job's ranks fill the machine's nodes in order."""
    return Placement.of([topology.node_of(rank) for rank in dist.get_process_group_ranks(group)])


def _ranks(group: ProcessGroup, topic: str) -> Ranks:
    return Ranks(
        rank=group.rank(),
        world_size=group.size(),
        store=own_store(group, topic),
        timeout_s=settings().timeout_s or group_timeout_s(group),
        name="plan",
    )


def local(topology: Topology) -> Basis:
    """The machine with what this rank's disk says of it."""
    return Basis(topology=topology, tuned=load_results(topology))
