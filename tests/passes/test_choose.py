"""Among matches that exclude each other, the set with the largest saving together is taken."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from mkcompile.ops.problem import Problem
from mkcompile.ops.registry import Call
from mkcompile.passes.choose import MAX_EXACT, Candidate, choose
from mkcompile.passes.site import Match

GRAPH = fx.Graph()
NODES = [GRAPH.placeholder(f"n{i}") for i in range(30)]
PROBLEM = Problem(operator="gemm_all_reduce", m=1, n=1, k=1, world_size=2, dtype="float32", dtype_bytes=4)


def candidate(saving: float, claims: Iterable[int]) -> Candidate:
    nodes = tuple(NODES[i] for i in claims)
    match = Match(call=cast(Call, None), outputs=(), collectives=nodes, problem=PROBLEM)
    return Candidate(match=match, saving=saving)


def savings(candidates: Iterable[Candidate]) -> list[float]:
    return [one.saving for one in candidates]


def test_one_large_match_beats_a_smaller_part() -> None:
    chosen, rest = choose([candidate(3, [0]), candidate(5, [0, 1])])
    assert savings(chosen) == [5] and savings(rest) == [3]


def test_two_parts_together_beat_a_larger_match() -> None:
    chosen, rest = choose([candidate(5, [0, 1]), candidate(3, [0]), candidate(4, [1])])
    assert savings(chosen) == [4, 3] and savings(rest) == [5]


def test_of_equal_savings_the_one_operator_is_taken() -> None:
    chosen, _ = choose([candidate(2, [0]), candidate(4, [0, 1]), candidate(2, [1])])
    assert savings(chosen) == [4]


def test_matches_that_share_nothing_are_all_taken() -> None:
    chosen, rest = choose([candidate(i, [i]) for i in range(20)])
    assert len(chosen) == 20 and not rest


def test_large_tangles_are_resolved_greedily() -> None:
    tangle = [candidate(10 + i, [i, i + 1]) for i in range(MAX_EXACT + 1)]
    chosen, rest = choose(tangle)
    assert chosen[0].saving == 10 + MAX_EXACT
    assert len(chosen) + len(rest) == len(tangle)
    assert _compatible(chosen)


def _compatible(candidates: Iterable[Candidate]) -> bool:
    claimed = [node for one in candidates for node in one.match.claims]
    return len(claimed) == len(set(claimed))


@given(
    st.lists(st.tuples(st.integers(1, 50), st.sets(st.integers(0, 8), min_size=1, max_size=3)), min_size=1, max_size=8)
)
def test_no_compatible_set_saves_more(drawn: list[tuple[int, set[int]]]) -> None:
    candidates = [candidate(saving, claims) for saving, claims in drawn]
    chosen, rest = choose(candidates)
    assert _compatible(chosen)
    assert len(chosen) + len(rest) == len(candidates)
    every = (some for size in range(len(candidates) + 1) for some in combinations(candidates, size))
    best = max(sum(savings(some)) for some in every if _compatible(some))
    assert sum(savings(chosen)) == pytest.approx(best)
