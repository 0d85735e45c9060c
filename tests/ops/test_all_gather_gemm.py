"""The all-gather + GEMM operator by itself: what it computes on four ranks, its shapes, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from mkcompile.errors import GroupError, OperatorInputError
from mkcompile.ops.all_gather_gemm import AllGatherGemm, completed
from tests.lockstep import World, run

WORLD_SIZE = 4
GROUP = "0"
pytestmark = pytest.mark.usefixtures("group")


def whole(*shape: int, seed: int) -> Tensor:
    """Small whole numbers: products of them are exact."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def call(rank: int, dim: int, **changes: Any) -> AllGatherGemm:
    """A shard [2, 3, 8] with one weight of each form and one bias; gathered rows M = 24 (dim < 2)."""
    rows, columns = (24, 8) if dim < 2 else (6, 32)
    w = [whole(columns, 5, seed=1), whole(rows, 6, seed=2), whole(7, rows, seed=3), whole(9, columns, seed=4)]
    given = AllGatherGemm(
        x=whole(2, 3, 8, seed=10 + rank),
        w=w,
        bias=[whole(5, seed=5), None, None, None],
        forms=[0, 1, 2, 3],
        dim=dim,
        return_gathered=True,
        world_size=WORLD_SIZE,
        group=GROUP,
        plan_key="",
    )
    return replace(given, **changes)


@pytest.mark.parametrize("returned", [True, False])
def test_a_mixed_call_is_what_kernels_make_and_the_rest(returned: bool) -> None:
    given = call(0, 1, return_gathered=returned)
    gathered = torch.cat([call(rank, 1).x for rank in range(WORLD_SIZE)], 1)
    part = given.of_kernels()
    assert part is not None and list(part.forms) == [0] and part.return_gathered
    found = completed(part.of_gathered(gathered), given.w, given.forms, returned)
    wanted = given.of_gathered(gathered)
    assert len(found) == len(wanted) == 4 + returned
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert part.of_kernels() is None


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_every_rank_gets_the_products_of_the_gathered_tensor(dim: int) -> None:
    given = call(0, dim)
    gathered = torch.cat([call(rank, dim).x for rank in range(WORLD_SIZE)], dim)
    g = gathered.flatten(0, 1).double()
    w = [one.double() for one in given.w]
    bias = given.bias[0]
    assert bias is not None
    wanted = [g @ w[0] + bias, g.t() @ w[1], w[2] @ g, w[3] @ g.t()]
    for found in run(World(WORLD_SIZE), lambda one: one.reference(), lambda rank: [call(rank, dim)]):
        assert all(torch.equal(x.double(), y) for x, y in zip(found, wanted, strict=False))
        assert torch.equal(found[-1], gathered)


@pytest.mark.parametrize("return_gathered", [False, True])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_fake_results_have_the_shapes_of_the_real_ones(dim: int, return_gathered: bool) -> None:
    given = call(0, dim, return_gathered=return_gathered)
    real = run(World(WORLD_SIZE), lambda one: one.reference(), lambda rank: [replace(given, x=call(rank, dim).x)])[0]
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = given.fake()
    assert [(one.shape, one.dtype) for one in fake] == [(one.shape, one.dtype) for one in real]
    assert len(fake) == 4 + return_gathered


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 3}, "dim 3 is outside"),
        ({"dim": -1}, "dim -1 is outside"),
        ({"forms": [0, 1, 2]}, "one form"),
        ({"bias": [None]}, "one bias"),
        ({"w": [], "bias": [], "forms": []}, "at least one weight"),
        ({"forms": [0, 1, 2, 4]}, "is not 0, 1, 2 or 3"),
        ({"forms": [1, 1, 2, 3]}, "inner size 24, got 8"),
        ({"bias": [whole(4, seed=0), None, None, None]}, "bias"),
        ({"bias": [None, whole(6, seed=0), None, None]}, "form 0"),
        ({"x": whole(2, 3, 8, seed=0).bfloat16()}, "one dtype"),
        ({"x": whole(2, 3, 8, seed=0).int()}, "floating-point"),
        ({"x": whole(2, 3, 8, seed=0).to_sparse()}, "dense"),
        ({"x": torch.empty(2, 3, 8, device="meta")}, "one device"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OperatorInputError, match=message):
        replace(call(0, 1), **changes).check()


def test_a_wrong_group_is_named() -> None:
    with pytest.raises(GroupError, match="no process group named 'nowhere'"):
        call(0, 1, group="nowhere").check()
    with pytest.raises(GroupError, match="has 4 ranks"):
        call(0, 0, world_size=2, w=[whole(8, 5, seed=1)], bias=[None], forms=[0]).check()


def test_the_problem_counts_gathered_rows_and_all_columns() -> None:
    problem = call(0, 1).problem()
    assert (problem.m, problem.k, problem.n, problem.outer, problem.dim) == (24, 8, 5 + 6 + 7 + 9, 2, "rows")
    assert (problem.num_gemms, problem.has_bias, problem.returns_gathered) == (4, True, True)
    assert call(0, 2).problem().dim == "columns"
