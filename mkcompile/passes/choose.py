"""Which of the matches that exclude each other are taken: those with the largest predicted saving together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx
from torch import fx

from mkcompile.passes.site import Match

# Up to here every subset of matches that exclude each other is weighed; larger tangles are resolved greedily.
MAX_EXACT = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A match and its predicted saving. Units: seconds, or any other unit that all candidates share."""

    match: Match
    saving: float


def choose(candidates: Sequence[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """The candidates to take, largest saving first, and the rest. No node is claimed twice among those taken."""
    taken: set[int] = set()
    for tangle in nx.connected_components(_conflicts(candidates)):
        taken |= _best(sorted(tangle), candidates)
    chosen = sorted(taken, key=lambda i: (-candidates[i].saving, i))
    return [candidates[i] for i in chosen], [one for i, one in enumerate(candidates) if i not in taken]


def _conflicts(candidates: Sequence[Candidate]) -> nx.Graph:
    """One vertex a candidate, an edge where two claim the same node."""
    claimants: dict[fx.Node, list[int]] = defaultdict(list)
    graph = nx.Graph()
    for i, one in enumerate(candidates):
        graph.add_node(i)
        for node in one.match.claims:
            graph.add_edges_from((i, other) for other in claimants[node])
            claimants[node].append(i)
    return graph


def _best(tangle: list[int], candidates: Sequence[Candidate]) -> set[int]:
    """The compatible subset with the largest saving; among equals the one with fewer, then earlier, matches."""
    if len(tangle) == 1:
        return set(tangle)
    claims = {i: candidates[i].match.claims for i in tangle}
    falling = sorted(tangle, key=lambda i: (-candidates[i].saving, i))
    if len(tangle) > MAX_EXACT:
        return _greedy(falling, claims)

    def weigh(rest: list[int], claimed: set[fx.Node]) -> tuple[float, list[int]]:
        if not rest:
            return 0.0, []
        first, *others = rest
        without = weigh(others, claimed)
        if not claimed.isdisjoint(claims[first]):
            return without
        saving, members = weigh(others, claimed | claims[first])
        with_first = (saving + candidates[first].saving, [first, *members])
        return with_first if (with_first[0], -len(with_first[1])) >= (without[0], -len(without[1])) else without

    return set(weigh(falling, set())[1])


def _greedy(falling: list[int], claims: dict[int, set[fx.Node]]) -> set[int]:
    taken: set[int] = set()
    claimed: set[fx.Node] = set()
    for i in falling:
        if claimed.isdisjoint(claims[i]):
            taken.add(i)
            claimed |= claims[i]
    return taken
