"""The references' sums: each partial is rounded once for the way, the sum once, in rank order, alike on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mkcompile.errors import OperatorInputError
from mkcompile.ops.gemm_all_reduce import GemmAllReduce, GemmAllReduceAdd
from mkcompile.ops.gemm_reduce_scatter import GemmReduceScatter, GemmReduceScatterAdd
from mkcompile.ops.registry import overload
from tests.captured import assert_same_values, capture, fake_group
from tests.lockstep import World, run
from tests.regions import all_reduce

GROUP = "0"
# Rounded after every addition, the partials come to the first of them: the others are half a rounding step each.
FIRST = {torch.bfloat16: 256.0, torch.float16: 2048.0}
DTYPES = tuple(FIRST)


@pytest.fixture(params=[2, 3, 4], autouse=True)
def world_size(request: pytest.FixtureRequest) -> Iterator[int]:
    with fake_group(request.param):
        yield request.param


def operands(rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A product whose every element is this rank's partial, times a number for each column."""
    x_MK = torch.zeros(12, 8, dtype=dtype)
    x_MK[:, 0] = 1.0 if rank else FIRST[dtype]
    return x_MK, torch.ones(8, 7, dtype=dtype) * torch.tensor([1, 2, 4, 8, 1, 2, 4], dtype=dtype)


def wanted(world_size: int, dtype: torch.dtype, reduce_op: str) -> Tensor:
    partials = [torch.mm(*operands(rank, dtype)).float() for rank in range(world_size)]
    total = torch.stack(partials).double().sum(0)
    return (total / world_size if reduce_op == "avg" else total).float().to(dtype)


@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_ranks_get_the_sum_rounded_once(world_size: int, dtype: torch.dtype, reduce_op: str) -> None:
    def reduce(x_MK: Tensor, w_KN: Tensor) -> Tensor:
        return GemmAllReduce([x_MK], [w_KN], None, reduce_op, world_size, GROUP, "").reference()

    for result in run(World(world_size), reduce, lambda rank: operands(rank, dtype)):
        assert torch.equal(result, wanted(world_size, dtype, reduce_op))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scattered_sums_are_rounded_once(world_size: int, dtype: torch.dtype) -> None:
    def reduce(x_MK: Tensor, w_KN: Tensor) -> Tensor:
        return GemmReduceScatter([x_MK], [w_KN], None, [12, 7], 0, "sum", world_size, GROUP, "").reference()

    results = run(World(world_size), reduce, lambda rank: operands(rank, dtype))
    assert torch.equal(torch.cat(results), wanted(world_size, dtype, "sum"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_added_is_the_rounded_sum(world_size: int, dtype: torch.dtype) -> None:
    start = torch.linspace(-3, 3, 12 * 7).reshape(12, 7).to(dtype)
    rows = 12 // world_size

    def reduce(x_MK: Tensor, w_KN: Tensor, slice_SN: Tensor) -> tuple[Tensor, Tensor]:
        whole, part = start.clone(), slice_SN.clone()
        end = "sum", world_size, GROUP, ""
        assert overload(GemmAllReduceAdd)(whole, [x_MK], [w_KN], None, *end) is None
        assert overload(GemmReduceScatterAdd)(part, [x_MK], [w_KN], None, [12, 7], 0, *end) is None
        return whole, part

    results = run(
        World(world_size), reduce, lambda rank: (*operands(rank, dtype), start[rank * rows : (rank + 1) * rows])
    )
    expected = start + wanted(world_size, dtype, "sum")
    assert all(torch.equal(whole, expected) for whole, _ in results)
    assert torch.equal(torch.cat([part for _, part in results]), expected)


@pytest.mark.parametrize(
    ("residual", "told"),
    [
        (torch.zeros(12, 8), r"shape \(12, 8\); give the result's, \(12, 7\)"),
        (torch.zeros(12, 7, dtype=torch.float16), "one dtype, got torch.float16, torch.float32"),
        (torch.zeros(7, 12).t(), r"strides \(1, 12\); give a contiguous tensor"),
        (torch.zeros(12, 7, device="meta"), "call it with CPU or CUDA tensors"),
        (torch.zeros(12, 7, dtype=torch.int32), "give a floating-point tensor"),
    ],
)
def test_a_residual_that_does_not_fit_is_told(world_size: int, residual: Tensor, told: str) -> None:
    call = GemmAllReduceAdd(residual, [torch.zeros(12, 8)], [torch.zeros(8, 7)], None, "sum", world_size, GROUP, "")
    with pytest.raises(OperatorInputError, match=told):
        call.check()
    replace(call, residual=torch.zeros(12, 7)).check()


def test_a_residual_of_a_scattered_sum_is_a_slice(world_size: int) -> None:
    end = [2, 12, 7], 1, "sum", world_size, GROUP, ""
    call = GemmReduceScatterAdd(torch.zeros(24, 7), [torch.zeros(24, 8)], [torch.zeros(8, 7)], None, *end)
    with pytest.raises(OperatorInputError, match=rf"give the result's, \(2, {12 // world_size}, 7\)"):
        call.check()
    replace(call, residual=torch.zeros(2, 12 // world_size, 7)).check()


def test_a_reduction_in_float32_keeps_its_bits_when_it_is_fused(world_size: int) -> None:
    def function(x_MK: Tensor, w_KN: Tensor) -> Tensor:
        return all_reduce((x_MK @ w_KN).float(), GROUP).bfloat16()

    (graph,) = capture(function, *operands(0, torch.bfloat16))
    assert graph.calls["gemm_all_reduce"] == 1 and not graph.left
    before = run(World(world_size), graph.before, lambda rank: operands(rank, torch.bfloat16))
    after = run(World(world_size), graph.after, lambda rank: operands(rank, torch.bfloat16))
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one[0], other[0])
    assert_same_values(graph, world_size)
