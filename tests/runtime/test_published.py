"""What rank 0 tells is what all ranks plan from; ranks whose plans differ, or that never come, are named."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from mkcompile.errors import PlanMismatchError
from mkcompile.ops.gemm_all_reduce import GemmAllReduce
from mkcompile.plan.buckets import entry_name
from mkcompile.plan.decide import unfused_plan
from mkcompile.plan.disk import Measured, Results
from mkcompile.plan.exchange import AbsentRankError
from mkcompile.plan.topology import preset
from mkcompile.runtime.form import Form, form_of
from mkcompile.runtime.published import Basis, Published
from mkcompile.runtime.tactics import Planned
from tests.spawn import Outcomes, run_cases

TOPOLOGY = replace(preset("2xh200"), name="the machine of rank 0")
DEADLINE_S = 10.0


def call(m: int) -> tuple[GemmAllReduce, Form]:
    """A call by hand and its form."""
    group = dist.group.WORLD
    assert group is not None
    x, w = (torch.ones(shape, dtype=torch.bfloat16) for shape in ((m, 64), (64, 512)))
    one = GemmAllReduce([x], [w], None, "sum", 2, group.group_name, "")
    form = form_of(one)
    assert isinstance(form, Form)
    return one, form


def basis_of_rank_0() -> Basis:
    """Called on another rank it is an error."""
    assert dist.get_rank() == 0
    tuned, problem = Results(), call(256)[0].problem()
    tuned.add(entry_name(problem), Measured(plan=unfused_plan(problem, TOPOLOGY), seconds=1.0))
    return Basis(topology=TOPOLOGY, tuned=tuned)


def told(rank: int, world_size: int) -> tuple[str, list[str]]:
    group, published = dist.group.WORLD, Published(topic="test")
    assert group is not None and published.known(group) is None
    basis = published.of(group, basis_of_rank_0)
    assert published.of(group, basis_of_rank_0) is basis is published.known(group)
    return basis.topology.name, list(basis.tuned.entries)


def other_grids(rank: int, world_size: int) -> str:
    planned = Planned(basis_of_rank_0)
    assert planned(*call(256), 128) is not None
    try:
        planned(*call(65536), 128 - 16 * rank)
    except PlanMismatchError as error:
        return str(error)
    return "nothing"


def rank_0_never_comes(rank: int, world_size: int) -> str:
    group = dist.group.WORLD
    assert group is not None
    if rank == 0:
        return "elsewhere"
    try:
        Published(topic="absent").of(group, basis_of_rank_0)
    except AbsentRankError as error:
        return str(error)
    return "nothing"


def rank_0_tries_again(rank: int, world_size: int) -> str:
    """Rank 1 comes when rank 0 has given up; before the second try rank 0 measures anew."""
    group, published, tries = dist.group.WORLD, Published(topic="again"), count()
    assert group is not None

    def own() -> Basis:
        return Basis(topology=replace(TOPOLOGY, name=f"try {next(tries)}"))

    if rank == 0:
        with patch("mkcompile.runtime.published.group_timeout_s", return_value=0.05), pytest.raises(AbsentRankError):
            published.of(group, own)
        dist.barrier()
    else:
        dist.barrier()
        published.of(group, own)
    dist.barrier()
    return published.of(group, own).topology.name


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    cases = {one.__name__: one for one in (told, other_grids, rank_0_never_comes, rank_0_tries_again)}
    return run_cases(cases, 2, group_timeout_s=DEADLINE_S, timeout_s=200.0)


def test_rank_0s_machine_and_measurements_are_everybodys(outcomes: Outcomes) -> None:
    first, second = outcomes.values("told")
    assert first == second
    assert first[0] == TOPOLOGY.name and len(first[1]) == 1


def test_plans_that_differ_are_an_error_on_both_ranks(outcomes: Outcomes) -> None:
    for message in outcomes.values("other_grids"):
        assert "plan of operator=gemm_all_reduce" in message and "m=65536" in message
        assert "rank 0" in message and "rank 1" in message and "do not launch the same thing" in message


def test_a_rank_0_that_never_comes_is_named_in_time(outcomes: Outcomes) -> None:
    message = outcomes.values("rank_0_never_comes")[1]
    assert "waited 10 s for rank 0" in message


def test_a_second_try_tells_what_the_first_told(outcomes: Outcomes) -> None:
    assert outcomes.values("rank_0_tries_again") == ["try 0", "try 0"]


def test_a_lone_rank_asks_nobody_and_each_life_of_a_group_anew() -> None:
    from tests.runtime.fakes import lone_group  # it reads the settings, which ranks must not have done

    published = Published(topic="test")
    for name in ("one", "two"):
        with lone_group():
            group = dist.group.WORLD
            assert group is not None
            basis = Basis(topology=replace(TOPOLOGY, name=name))
            assert published.of(group, lambda basis=basis: basis).topology.name == name
