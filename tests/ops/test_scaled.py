"""Operators on scaled 8-bit floats: what each bad argument is told, and what the planner is told of a good one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mkcompile.errors import OperatorInputError
from mkcompile.ops.all_gather_gemm import AllGatherScaledGemm
from mkcompile.ops.gemm_all_reduce import ScaledGemmAllReduce
from mkcompile.ops.gemm_reduce_scatter import ScaledGemmReduceScatter

WORLD_SIZE = 4
GROUP = "0"
ROWS, INNER, COLUMNS = 8, 16, 32
ONE = torch.ones(())
pytestmark = pytest.mark.usefixtures("group")


def small(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    return torch.zeros(shape).to(dtype)


def all_reduce(**changes: Any) -> ScaledGemmAllReduce:
    x, w = [small(ROWS, INNER)], [small(COLUMNS, INNER).t()]
    given = ScaledGemmAllReduce(x, w, [ONE], [ONE], None, torch.bfloat16, False, "sum", WORLD_SIZE, GROUP, "")
    return replace(given, **changes)


BY_ROW = {"x_scale": [torch.ones(ROWS, 1)], "w_scale": [torch.ones(1, COLUMNS)]}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"x": [torch.zeros(ROWS, INNER)]}, "take float8"),
        ({"w": [torch.zeros(INNER, COLUMNS).bfloat16()]}, "take float8"),
        ({"x": [small(ROWS, INNER), small(ROWS, INNER, dtype=torch.float8_e5m2)]}, "as many inputs as weights"),
        ({"x_scale": []}, "one x_scale and one w_scale"),
        ({"x_scale": [ONE.double()]}, "float32 scales"),
        ({"x_scale": [torch.ones(ROWS, 2)]}, "float32 scales"),
        ({"x_scale": [torch.ones(ROWS, 1)]}, "float32 scales"),
        ({"out_dtype": torch.float8_e4m3fn}, "give bfloat16, float16 or float32"),
        ({"bias": torch.zeros(COLUMNS)}, "give the result's"),
        ({"bias": torch.zeros(COLUMNS - 1).bfloat16()}, "give \\[32\\]"),
        ({"reduce_op": "max"}, "can't be fused"),
    ],
)
def test_bad_arguments_are_told_what_would_be_right(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(OperatorInputError, match=told):
        all_reduce(**changes).check()


def test_good_arguments_pass() -> None:
    for changes in ({}, BY_ROW, {"bias": torch.zeros(COLUMNS).bfloat16()}, {"out_dtype": torch.float32}):
        all_reduce(**changes).check()
    all_reduce(x=[small(ROWS, INNER, dtype=torch.float8_e5m2)]).check()


def test_a_scatter_that_does_not_divide_is_refused() -> None:
    given = all_reduce()
    first = given.x, given.w, given.x_scale, given.w_scale, None, torch.bfloat16, False
    end = "sum", WORLD_SIZE, GROUP, ""
    ScaledGemmReduceScatter(*first, [ROWS, COLUMNS], 0, *end).check()
    with pytest.raises(OperatorInputError, match="do not divide"):
        ScaledGemmReduceScatter(*first, [4, 2, COLUMNS], 1, *end).check()


def test_scales_of_a_gathered_input_are_those_of_all_rows() -> None:
    x, w = small(ROWS, INNER), small(COLUMNS, INNER).t()
    of_w = [torch.ones(1, COLUMNS)]
    end = [None], torch.bfloat16, False, 0, False, WORLD_SIZE, GROUP, ""
    AllGatherScaledGemm(x, [w], [torch.ones(WORLD_SIZE * ROWS, 1)], of_w, *end).check()
    with pytest.raises(OperatorInputError, match="scales 0"):
        AllGatherScaledGemm(x, [w], [torch.ones(ROWS, 1)], of_w, *end).check()


def test_the_problem_counts_bytes_of_operands_and_of_results() -> None:
    problem = all_reduce(**BY_ROW).problem()
    assert (problem.operator, problem.dtype, problem.scales) == ("gemm_all_reduce", "float8_e4m3fn", "row")
    assert problem.sent_bytes == 2 * 2 * ROWS * COLUMNS * (WORLD_SIZE - 1) // WORLD_SIZE
    assert all_reduce().problem().key() != problem.key()
