"""Real models on 2 and 4 ranks: which collectives are fused, and whether values and gradients are as right as eager's.

`make test` runs a taste of it; `make test-all` every model in every dtype and batch, and some through code generation.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pytest

from tests.models.expected import EXPECTED, expected
from tests.models.harness import Cell, Result, run_cell, run_wrong_cell
from tests.models.judge import complaints
from tests.models.matrix import GENERATED, QUICK, SITES, WIDE
from tests.models.zoo import ZOO
from tests.spawn import Outcomes, RankResult, run_cases

WRONG = "wrong"
WORLDS = (2, 4)
CELLS_A_SPAWN = 24


def _run(cells: Mapping[str, Cell], world_size: int, timeout_s: float) -> Outcomes:
    """All cells, some in each spawn: what torch keeps of meshes keeps their groups, whose threads never sleep for long.

    `CUDA_VISIBLE_DEVICES`: Hugging Face's loader would take a GPU, if there is one.
    """
    names = list(cells)
    environment = {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    found: dict[str, list[RankResult]] = {}
    for start in range(0, len(names), CELLS_A_SPAWN):
        cases = {name: partial(run_cell, cell=cells[name]) for name in names[start : start + CELLS_A_SPAWN]}
        if start == 0:
            cases[WRONG] = partial(run_wrong_cell, cell=cells[names[0]])
        outcomes = run_cases(
            cases, world_size, timeout_s=timeout_s, group_timeout_s=120, environment=environment, one_group=True
        )
        found.update(outcomes.by_case)
    return Outcomes(found)


def _check(outcomes: Outcomes, cell: Cell) -> None:
    results: list[Result] = outcomes.values(cell.name)
    wanted = [dict(graph) for graph in expected(cell.model, cell.dtype).graphs(cell.trains)]
    assert [list(result.sites) for result in results] == [wanted] * len(results)
    assert complaints(results, cell.dtype) == []


def _check_that_wrong_is_noticed(outcomes: Outcomes, cell: Cell) -> None:
    assert complaints(outcomes.values(WRONG), cell.dtype) != []


@pytest.fixture(scope="module")
def quick() -> Outcomes:
    return _run(QUICK, 2, timeout_s=300)


@pytest.fixture(scope="module", params=WORLDS)
def wide(request: pytest.FixtureRequest) -> Outcomes:
    return _run(WIDE, request.param, timeout_s=3600)


@pytest.fixture(scope="module")
def sites() -> Outcomes:
    return _run(SITES, 2, timeout_s=1200)


@pytest.fixture(scope="module")
def generated() -> Outcomes:
    return _run(GENERATED, 2, timeout_s=1200)


@pytest.mark.parametrize("name", QUICK)
def test_sites_and_numbers(quick: Outcomes, name: str) -> None:
    _check(quick, QUICK[name])


def test_a_wrong_operator_is_noticed(quick: Outcomes) -> None:
    _check_that_wrong_is_noticed(quick, next(iter(QUICK.values())))


def test_every_model_has_an_expectation() -> None:
    assert set(EXPECTED) == set(ZOO)


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDE)
def test_sites_and_numbers_of_every_model(wide: Outcomes, name: str) -> None:
    _check(wide, WIDE[name])


@pytest.mark.slow
@pytest.mark.other_torch
@pytest.mark.parametrize("name", SITES)
def test_sites_and_numbers_on_other_versions_of_torch(sites: Outcomes, name: str) -> None:
    _check(sites, SITES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", GENERATED)
def test_sites_and_numbers_of_generated_code(generated: Outcomes, name: str) -> None:
    _check(generated, GENERATED[name])


@pytest.mark.slow
def test_a_wrong_operator_is_noticed_in_generated_code(generated: Outcomes) -> None:
    _check_that_wrong_is_noticed(generated, next(iter(GENERATED.values())))
