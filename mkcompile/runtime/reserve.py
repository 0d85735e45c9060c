"""How many SMs a launch leaves to other kernels: many where NCCL may have to run beside it, else few.

A fused kernel that waits for its peers must leave NCCL's kernels room to run, or two ranks that start them in different
order wait for each other until the deadline. Source: docs/decisions/305-reserve.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _pg_map

from mkcompile.config import settings
from mkcompile.plan import key
from mkcompile.runtime.exchange import Exchange

FEW_SMS = 4
#: The process groups that this process is in: torch's own table, cleared and filled in place.
GROUPS = _pg_map


#: Looks a group up without keeping it; None where it has ended.
Newest = Callable[[], ProcessGroup | None]


def newest_group() -> Newest:
    """The group that was made last. One that has ended and another made since leave their number as it was."""
    found = next(reversed(GROUPS), None)
    return _no_group if found is None else weakref.ref(found)


def _no_group() -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """What decides for one group, the same on all of its ranks.

    `has_traffic`: collectives that no graph shows are to be expected beside the group's launches. `given`: the user's
    number goes before ours. `newest`: the group that this process had made last when that was decided.
    """

    has_traffic: bool
    given: bool
    newest: Newest

    def sms(self, plan_key: str) -> int:
        """SMs that this call's launches leave."""
        return self._sms(plan_key, self.has_traffic)

    def sms_now(self, plan_key: str, group: ProcessGroup) -> int:
        """The same with the groups that this process has come to have since; may differ by rank."""
        return self._sms(plan_key, self.has_traffic or has_traffic_beside(group))

    def _sms(self, plan_key: str, has_traffic: bool) -> int:
        """Few only for calls of a compiled graph, where all that may run beside them is seen: calls by hand may have a
        collective of their own group in flight.
        """
        is_alone = key.ALONE in key.facts_of(plan_key) and not has_traffic
        return FEW_SMS if is_alone and not self.given else settings().sm_reserve


def of_group(exchange: Exchange) -> Reserve:
    """Collective: what any of the ranks knows.

    Raises: PeerTimeoutError for ranks that do not come.
    """
    group = exchange.group()
    assert group is not None
    newest = newest_group()
    own = f"{has_traffic_beside(group):d} {settings().is_sm_reserve_given:d}"
    said = [text.split() for text in exchange.gather("traffic", own)]
    return Reserve(
        has_traffic=any(one == "1" for one, _ in said),
        given=any(other == "1" for _, other in said),
        newest=newest,
    )


def has_traffic_beside(group: ProcessGroup) -> bool:
    """Is this process in a group of other ranks? Then there is data parallelism, whose collectives come from hooks."""
    ranks = set(dist.get_process_group_ranks(group))
    others = [one for one in GROUPS if one is not group and one.size() > 1 and _may_use_gpus(one)]
    return any(set(dist.get_process_group_ranks(one)) != ranks for one in others)


def _may_use_gpus(group: ProcessGroup) -> bool:
    """Not those that move host memory only."""
    return dist.get_backend(group) not in (dist.Backend.GLOO, dist.Backend.MPI)
