"""What all ranks must plan from, told by rank 0: the topology and the measurements."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Protocol

from mkcompile.plan.disk import Results
from mkcompile.plan.exchange import Ranks
from mkcompile.plan.topology import Topology


class HasBasis(Protocol):
    """A machine and its measurements."""

    @property
    def topology(self) -> Topology: ...
    @property
    def tuned(self) -> Results: ...


def publish(ranks: Ranks, own: Callable[[], HasBasis]) -> tuple[Topology, Results]:
    """Rank 0 probes and reads its disk (`own`); every rank gets the same two values.

    Raises: AbsentRankError where rank 0 does not come in time.
    """
    told = ""
    if ranks.rank == 0:
        basis = own()
        told = json.dumps([basis.topology.to_json(), basis.tuned.to_json()])
    topology_text, results_text = json.loads(ranks.share("publish", told))
    return Topology.from_json(topology_text), Results.from_json(results_text)
