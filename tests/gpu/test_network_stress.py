"""Launches behind one another over several nodes, for a few seconds; `network_stress.py` has more cases, for longer."""

from __future__ import annotations

import pytest

from .network_stress import Case, Stress

_SECONDS = 3.0


@pytest.mark.parametrize(
    "case",
    [
        Case(nodes=4, local=1),
        Case(nodes=2, local=2, link="slow"),
        Case(nodes=2, local=4, operators=("gather", "reduce_scatter", "all_reduce")),
    ],
    ids=lambda case: case.name,
)
def test_launches_behind_one_another_end(case: Case) -> None:
    stress = Stress(case)
    stress.run_for(_SECONDS)
    assert not stress.failures, f"{len(stress.failures)} of {stress.rounds} rounds: {stress.failures[0]}"
