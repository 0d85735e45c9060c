"""Operators by hand: results, and what bad input is told before anything is launched."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import mkcompile
from mkcompile.errors import GroupError, MkcompileError, OperatorInputError
from tests.spawn import Outcomes, run_cases

gemm_all_reduce = mkcompile.ops.gemm_all_reduce
gemm_reduce_scatter = mkcompile.ops.gemm_reduce_scatter


def own(rank: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * rank + len(shape) + shape[-1]))


def summed(x: Tensor) -> Tensor:
    total = x.clone()
    dist.all_reduce(total)
    return total


def worst(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    return float((got.double() - want.double()).abs().max())


def all_reduce_results(rank: int, world_size: int) -> list[float]:
    x, w, bias = own(rank, 3, 5, 8), own(rank, 8, 6), own(rank, 6)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    want = summed(x.double() @ w.double() + bias.double())
    groups = [None, "0", dist.group.WORLD, mesh, mesh["tp"]]
    errors = [worst(gemm_all_reduce(x, w, bias, group=group), want) for group in groups]
    errors.append(worst(gemm_all_reduce(x, w, reduce_op="avg"), summed(x.double() @ w.double()) / world_size))
    return errors


def reduce_scatter_results(rank: int, world_size: int) -> list[float]:
    x, w, bias = own(rank, 4, 6, 8), own(rank, 8, 10), own(rank, 10)
    want = summed(x.double() @ w.double() + bias.double())
    return [worst(gemm_reduce_scatter(x, w, bias, dim=dim), want.chunk(world_size, dim)[rank]) for dim in (0, 1, 2, -1)]


def all_gather_results(rank: int, world_size: int) -> list[float]:
    x, w, wide, bias = own(rank, 4, 6, 8), own(rank, 8, 10), own(rank, 8 * world_size, 10), own(rank, 10)
    gathered = [torch.empty_like(x) for _ in range(world_size)]
    dist.all_gather(gathered, x)
    weights = {0: w, 1: w, 2: wide, -1: wide}
    return [
        worst(mkcompile.ops.all_gather_gemm(x, weight, bias, dim=dim), torch.cat(gathered, dim) @ weight + bias)
        for dim, weight in weights.items()
    ]


def ffn_results(rank: int, world_size: int) -> list[float]:
    x, gate, up, down = own(rank, 2, 3, 8), own(rank, 8, 12), 2 * own(rank, 8, 12), own(rank, 12, 6)
    act = torch.nn.functional.silu
    plain = mkcompile.ops.ffn(x, [up], down, activation="silu")
    gated = mkcompile.ops.ffn(x, [gate, up], down, activation="silu")
    return [
        worst(plain, summed(act(x @ up) @ down)),
        worst(gated, summed((act(x @ gate) * (x @ up)) @ down)),
    ]


def sub_group_is_used(rank: int, world_size: int) -> float:
    alone = [dist.new_group([one]) for one in range(world_size)]
    x, w = own(rank, 4, 8), own(rank, 8, 6)
    return worst(gemm_all_reduce(x, w, group=alone[rank]), x @ w)


def not_a_member(rank: int, world_size: int) -> str:
    group = dist.new_group([0])
    if rank == 0:
        return ""
    with pytest.raises(GroupError) as caught:
        gemm_all_reduce(own(rank, 4, 8), own(rank, 8, 6), group=group)
    return str(caught.value)


def different_shapes(rank: int, world_size: int) -> str:
    with pytest.raises(MkcompileError) as caught:
        gemm_all_reduce(own(rank, 4 + rank, 8), own(rank, 8, 6))
    return f"{type(caught.value).__name__} {caught.value}"


CASES: dict[str, Callable[[int, int], object]] = {
    case.__name__: case
    for case in (
        all_reduce_results,
        reduce_scatter_results,
        all_gather_results,
        ffn_results,
        sub_group_is_used,
        not_a_member,
        different_shapes,
    )
}


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return run_cases(CASES, 2)


@pytest.mark.parametrize("name", ["all_reduce_results", "reduce_scatter_results", "all_gather_results", "ffn_results"])
def test_results_by_every_kind_of_group(outcomes: Outcomes, name: str) -> None:
    assert max(max(errors) for errors in outcomes.values(name)) < 1e-4


def test_sub_group_of_one_does_not_communicate(outcomes: Outcomes) -> None:
    assert max(outcomes.values("sub_group_is_used")) < 1e-6


def test_rank_outside_of_the_group_is_told(outcomes: Outcomes) -> None:
    assert "not in the group" in outcomes.values("not_a_member")[1]


def test_ranks_with_different_shapes_are_told(outcomes: Outcomes) -> None:
    for message in outcomes.values("different_shapes"):
        assert message.startswith("PlanMismatchError") and "m=4" in message and "m=5" in message


@pytest.fixture
def alone() -> Iterator[None]:
    """A real group of this process only: bad input never reaches it."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'store'}", rank=0, world_size=1)
        yield
        dist.destroy_process_group()


X, W = torch.ones(4, 8), torch.ones(8, 6)
FLOAT8 = X.to(torch.float8_e4m3fn)
BAD_INPUT: dict[str, tuple[Callable[[], object], type[MkcompileError], str]] = {
    "integer": (lambda: gemm_all_reduce(X.int(), W.int()), OperatorInputError, "torch.int32; give a floating-point"),
    "dtypes": (lambda: gemm_all_reduce(X, W.half()), OperatorInputError, "one dtype, got torch.float16, torch.float32"),
    "bias dtype": (lambda: gemm_all_reduce(X, W, torch.ones(6).double()), OperatorInputError, "must have one dtype"),
    "meta": (lambda: gemm_all_reduce(X, W.to("meta")), OperatorInputError, "meta tensor has no data"),
    "sparse": (lambda: gemm_all_reduce(X.to_sparse(), W), OperatorInputError, "give a dense"),
    "sparse weight": (lambda: gemm_all_reduce(X, W.to_sparse()), OperatorInputError, "give a dense"),
    "sparse by torch.ops": (
        lambda: torch.ops.mkcompile.gemm_all_reduce([X.to_sparse()], [W], None, "sum", 1, "0", ""),
        OperatorInputError,
        "give a dense",
    ),
    "sparse weight by torch.ops": (
        lambda: torch.ops.mkcompile.all_gather_gemm(X, [W.to_sparse_csr()], [None], [0], 0, False, 1, "0", ""),
        OperatorInputError,
        "give a dense",
    ),
    "no tensor": (lambda: gemm_all_reduce(X, None), OperatorInputError, "w[0] is a NoneType; give a tensor"),  # type: ignore[arg-type]
    "8-bit floats": (lambda: gemm_all_reduce(FLOAT8, FLOAT8.t()), OperatorInputError, "which needs scales"),
    "8-bit floats, gathered": (
        lambda: mkcompile.ops.all_gather_gemm(FLOAT8, FLOAT8.t()),
        OperatorInputError,
        "which needs scales",
    ),
    "8-bit floats, network": (
        lambda: mkcompile.ops.ffn(FLOAT8, [FLOAT8.t()], FLOAT8),
        OperatorInputError,
        "which needs scales",
    ),
    "reduce op": (lambda: gemm_all_reduce(X, W, reduce_op="max"), OperatorInputError, "use one of sum, avg"),
    "inner size": (lambda: gemm_all_reduce(X, torch.ones(7, 6)), OperatorInputError, "8 columns and w[0] 7 rows"),
    "vector": (lambda: gemm_all_reduce(torch.ones(8), W), OperatorInputError, "at least two dimensions"),
    "batched weight": (lambda: gemm_all_reduce(X, torch.ones(2, 8, 6)), OperatorInputError, "give 2 dimensions"),
    "bias shape": (lambda: gemm_all_reduce(X, W, torch.ones(1, 6)), OperatorInputError, "give [6]"),
    "gradients": (lambda: gemm_all_reduce(X.clone().requires_grad_(), W), OperatorInputError, "torch.no_grad()"),
    "dim": (lambda: gemm_reduce_scatter(X, W, dim=2), OperatorInputError, "outside 0..1"),
    "group name": (
        lambda: gemm_all_reduce(X, W, group="tp"),
        GroupError,
        "no process group named 'tp' on this rank, which has 0",
    ),
    "group type": (lambda: gemm_all_reduce(X, W, group=3), GroupError, "give a group name, a ProcessGroup"),  # type: ignore[arg-type]
    "activation": (lambda: mkcompile.ops.ffn(X, [W], W.t(), activation="swish"), OperatorInputError, "relu2, gelu"),
    "up weights": (lambda: mkcompile.ops.ffn(X, [W] * 3, W.t()), OperatorInputError, "3 up weights do not fit"),
    "gather dim": (lambda: mkcompile.ops.all_gather_gemm(X, W, dim=2), OperatorInputError, "outside 0..1"),
    "world size": (
        lambda: torch.ops.mkcompile.gemm_all_reduce([X], [W], None, "sum", 2, "0", ""),
        GroupError,
        "has 1 ranks, the call says 2",
    ),
    "does not divide": (
        lambda: torch.ops.mkcompile.gemm_reduce_scatter([X], [W], None, [4, 6], 0, "sum", 3, "0", ""),
        OperatorInputError,
        "dimension 0 of (4, 6) is 4, which 3 ranks do not divide",
    ),
    "meta by torch.ops": (
        lambda: torch.ops.mkcompile.gemm_all_reduce([X.to("meta")], [W.to("meta")], None, "sum", 1, "0", ""),
        OperatorInputError,
        "meta tensor has no data",
    ),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_told_what_is_right(alone: None, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    call, kind, message = BAD_INPUT[name]
    with pytest.raises(kind) as caught:
        call()
    assert message in str(caught.value)


def test_no_gradients_needed_under_no_grad(alone: None) -> None:
    with torch.no_grad():
        assert gemm_all_reduce(X.clone().requires_grad_(), W).shape == (4, 6)


@pytest.mark.parametrize("call", [gemm_all_reduce, gemm_reduce_scatter])
def test_outside_of_a_process_group(call: Callable[..., Tensor]) -> None:
    assert not dist.is_initialized()
    with pytest.raises(GroupError, match=r"call torch\.distributed\.init_process_group first"):
        call(X, W)
    with pytest.raises(GroupError, match=r"call torch\.distributed\.init_process_group first"):
        torch.ops.mkcompile.gemm_all_reduce([X], [W], None, "sum", 2, "0", "")


def test_mesh_of_two_dimensions_is_refused(alone: None) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    with pytest.raises(GroupError, match=r"give the one to communicate over, for example mesh\['tp'\]"):
        gemm_all_reduce(X, W, group=mesh)
    assert gemm_all_reduce(X, W, group=mesh["tp"]).shape == (4, 6)
