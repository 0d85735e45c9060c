"""What all ranks must plan from, told by rank 0: the topology and the measurements."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from mkcompile.plan.disk import Results, load_results
from mkcompile.plan.exchange import Ranks
from mkcompile.plan.topology import Topology


def publish(ranks: Ranks, probe: Callable[[], Topology], folder: Path | None = None) -> tuple[Topology, Results]:
    """Rank 0 probes and reads its disk; every rank gets the same two values.

    Raises: AbsentRankError where rank 0 does not come in time.
    """
    told = ""
    if ranks.rank == 0:
        topology = probe()
        told = json.dumps([topology.to_json(), load_results(topology, folder).to_json()])
    topology_text, results_text = json.loads(ranks.share("publish", told))
    return Topology.from_json(topology_text), Results.from_json(results_text)
