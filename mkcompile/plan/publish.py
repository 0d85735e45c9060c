"""What the ranks of a group must plan from: the topology and the measurements that its rank 0 tells, and the node that
each rank is on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mkcompile.plan.disk import Results
from mkcompile.plan.exchange import Ranks
from mkcompile.plan.placement import Placement
from mkcompile.plan.topology import Topology

_KEY = "publish"


class HasBasis(Protocol):
    """A machine and its measurements."""

    @property
    def topology(self) -> Topology: ...
    @property
    def tuned(self) -> Results: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What all ranks of a group know alike."""

    topology: Topology
    tuned: Results
    placement: Placement


def say(ranks: Ranks, node: str, own: Callable[[], HasBasis]) -> str:
    """This rank's node; rank 0 probes and reads its disk (`own`) and says that too. Waits for nobody.

    Returns what `hear` is to be given.
    """
    said: list[str] = [node]
    if ranks.rank == 0:
        basis = own()
        said += [basis.topology.to_json(), basis.tuned.to_json()]
    text = json.dumps(said)
    ranks.say(_KEY, text)
    return text


def hear(ranks: Ranks, own: str) -> Told:
    """The same values on every rank. `own` is what `say` returned.

    Raises: AbsentRankError for a rank that does not come in time.
    """
    everyone: list[list[str]] = [json.loads(text) for text in ranks.hear(_KEY, own)]
    _, topology, tuned = everyone[0]
    placement = Placement.of([said[0] for said in everyone])
    machine = Topology.from_json(topology).reaching(placement.num_nodes)
    return Told(topology=machine, tuned=Results.from_json(tuned), placement=placement)
