"""Every operator keeps torch's rules for custom operators: schema, no aliasing, fake tensors, dynamic shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from mkcompile.ops.all_gather_gemm import AllGatherGemm, AllGatherScaledGemm
from mkcompile.ops.ffn import Ffn
from mkcompile.ops.gemm_all_reduce import GemmAllReduce, GemmAllReduceAdd, ScaledGemmAllReduce
from mkcompile.ops.gemm_reduce_scatter import GemmReduceScatter, GemmReduceScatterAdd, ScaledGemmReduceScatter
from mkcompile.ops.registry import Call, arguments, call_types, overload

GROUP = "0"
# what every rank of `world_size` gets: x [.., 8], weights as Linear keeps them (a transposed view) and as they are
ROWS, INNER, HIDDEN, COLUMNS = 8, 8, 6, 12


@pytest.fixture(params=["gloo-1", "fake-4"])
def world_size(request: pytest.FixtureRequest) -> Iterator[int]:
    """One real rank, whose results are right; or rank 0 of four, whose shapes differ from its inputs'."""
    backend, size = request.param.split("-")
    store = FakeStore() if backend == "fake" else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=int(size))
    yield int(size)
    dist.destroy_process_group()


def tensor(*shape: int) -> Tensor:
    return torch.randn(shape)


def linear(inputs: int, outputs: int) -> Tensor:
    return torch.randn(outputs, inputs).t()


def gemm_all_reduce(world_size: int) -> list[Call]:
    two = [tensor(ROWS, INNER), tensor(ROWS, HIDDEN)], [linear(INNER, COLUMNS), tensor(HIDDEN, COLUMNS)]
    return [
        GemmAllReduce([tensor(ROWS, INNER)], [linear(INNER, COLUMNS)], None, "sum", world_size, GROUP, ""),
        GemmAllReduce(*two, tensor(COLUMNS), "avg", world_size, GROUP, "key"),
    ]


def gemm_reduce_scatter(world_size: int) -> list[Call]:
    x, w = [tensor(ROWS, INNER)], [linear(INNER, COLUMNS)]
    shapes: list[tuple[list[int], int]] = [([ROWS, COLUMNS], 0), ([2, 4, COLUMNS], 1), ([ROWS, COLUMNS], 1)]
    return [GemmReduceScatter(x, w, tensor(COLUMNS), shape, dim, "sum", world_size, GROUP, "") for shape, dim in shapes]


def gemm_all_reduce_add(world_size: int) -> list[Call]:
    calls = [(tensor(ROWS, COLUMNS), arguments(one)) for one in gemm_all_reduce(world_size)]
    return [GemmAllReduceAdd(residual, *rest) for residual, rest in calls]


def gemm_reduce_scatter_add(world_size: int) -> list[Call]:
    calls = [(torch.randn_like(one.fake()), arguments(one)) for one in gemm_reduce_scatter(world_size)]
    return [GemmReduceScatterAdd(residual, *rest) for residual, rest in calls]


def all_gather_gemm(world_size: int) -> list[Call]:
    rows = 4 * world_size
    w = [linear(INNER, COLUMNS), tensor(rows, COLUMNS), tensor(COLUMNS, rows), tensor(COLUMNS, INNER)]
    every_form = [w, [tensor(COLUMNS), None, None, None], [0, 1, 2, 3]]
    along_columns = [[linear(INNER * world_size, COLUMNS)], [None], [0]]
    return [
        AllGatherGemm(tensor(2, 2, INNER), *every_form, 1, True, world_size, GROUP, ""),  # type: ignore[arg-type]
        AllGatherGemm(tensor(4, INNER), *every_form, 0, False, world_size, GROUP, ""),  # type: ignore[arg-type]
        AllGatherGemm(tensor(4, INNER), *along_columns, 1, True, world_size, GROUP, ""),  # type: ignore[arg-type]
    ]


def ffn(world_size: int) -> list[Call]:
    down, bias = linear(HIDDEN, COLUMNS), tensor(COLUMNS)
    separate = [linear(INNER, HIDDEN), linear(INNER, HIDDEN)]
    end: list[Any] = [[2, 4 * world_size, COLUMNS], 1, "sum", world_size, GROUP, ""]
    reduced: list[Any] = [[], -1, "avg", world_size, GROUP, ""]
    x = tensor(2, 4, INNER)
    return [
        Ffn(x, [separate[0]], [tensor(HIDDEN)], down, bias, "relu", False, [True] * 3, -1, *reduced),
        Ffn(x, separate, [None, None], down, None, "silu", True, [True] * 4, 1, *end),
        Ffn(x, [linear(INNER, 2 * HIDDEN)], [None], down, None, "gelu", True, [False, True, False], 1, *end),
    ]


def bytes_of(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn)


def scaled_pair(columns: int = COLUMNS) -> list[Any]:
    """Two summed products: x, w, a scale for each tensor, no bias, result and accumulation."""
    x, w = [bytes_of(ROWS, 16), bytes_of(ROWS, 16)], [bytes_of(columns, 16).t(), bytes_of(columns, 16).t()]
    return [x, w, [torch.rand(())] * 2, [torch.rand(1, 1)] * 2, None, torch.bfloat16, True]


def scaled_gemm_all_reduce(world_size: int) -> list[Call]:
    return [ScaledGemmAllReduce(*scaled_pair(16), "sum", world_size, GROUP, "")]


def scaled_gemm_reduce_scatter(world_size: int) -> list[Call]:
    return [ScaledGemmReduceScatter(*scaled_pair(16), [2, 4, 16], 1, "avg", world_size, GROUP, "")]


def all_gather_scaled_gemm(world_size: int) -> list[Call]:
    x, w, bias = bytes_of(2, 4, 16), bytes_of(32, 16).t(), torch.randn(32).bfloat16()
    scales: list[Any] = [[torch.rand(())], [torch.rand(())]]
    return [AllGatherScaledGemm(x, [w], *scales, [bias], torch.bfloat16, False, 1, True, world_size, GROUP, "")]


CALLS = {
    one.__name__: one
    for one in (
        all_gather_gemm,
        all_gather_scaled_gemm,
        ffn,
        gemm_all_reduce,
        gemm_all_reduce_add,
        gemm_reduce_scatter,
        gemm_reduce_scatter_add,
        scaled_gemm_all_reduce,
        scaled_gemm_reduce_scatter,
    )
}


def test_every_operator_is_checked() -> None:
    assert set(CALLS) == set(call_types())


@pytest.mark.parametrize("name", CALLS)
def test_the_operator_keeps_the_rules(name: str, world_size: int) -> None:
    # AOT dispatch compares values, which a fake group does not compute
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if "scaled" in name:
        checks.remove("test_schema")  # multiplies its inputs to see whether they changed, which 8-bit floats can't be
    elif world_size == 1:
        checks.append("test_aot_dispatch_dynamic")
    for call in CALLS[name](world_size):
        found = torch.library.opcheck(overload(type(call)), arguments(call), test_utils=checks)
        assert set(found.values()) == {"SUCCESS"}
