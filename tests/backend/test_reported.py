"""What users of other compilers and of symmetric memory reported, each tried here: `owner/repository#number`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.backend.calls import ALWAYS, same_on_all, watched_calls
from tests.spawn import Outcomes, run_cases

compiled_by_us = partial(torch.compile, backend="mkernel", options=ALWAYS)


def row_parallel(x: Tensor, w: Tensor, group: str = "0") -> Tensor:
    return funcol.all_reduce(x @ w, "sum", group)


def worst(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max())


def result_in_flight_enters(rank: int, world_size: int) -> tuple[float, int]:
    """pytorch#125677: the wait on a graph's input was removed."""
    x, w = torch.randn(256, 16), torch.randn(16, 16)

    def step(call: Any) -> Tensor:
        return call(funcol.all_reduce(x, "sum", "0"), w) + 0

    with watched_calls() as calls:
        return worst(step(compiled_by_us(row_parallel)), step(row_parallel)), len(calls)


def local_tensor_in_flight_enters(rank: int, world_size: int) -> tuple[float, int]:
    """pytorch#180614: what a DTensor holds was still on its way."""
    mesh = init_device_mesh("cpu", (world_size,))
    w = DTensor.from_local(torch.randn(16, 16), mesh, [Shard(0)])
    partial_sum = DTensor.from_local(torch.randn(4, 32), mesh, [Partial()])

    def product(x: DTensor) -> DTensor:
        return (x @ w).redistribute(mesh, [Replicate()])

    def step(call: Any) -> Tensor:
        return call(partial_sum.redistribute(mesh, [Shard(1)], async_op=True)).to_local() + 0

    with watched_calls() as calls:
        return worst(step(compiled_by_us(product)), step(product)), len(calls)


def threads_with_groups_of_their_own(rank: int, world_size: int) -> tuple[float, int]:
    """pytorch#188005: two threads raced for one handle; here in another order at each step."""
    groups = [dist.new_group([0, 1]).group_name for _ in range(2)]
    x, w = torch.randn(8, 16), torch.randn(16, 16)
    want = [row_parallel(x, w, group) + 0 for group in groups]
    calls = [compiled_by_us(partial(row_parallel, group=group), fullgraph=True, dynamic=False) for group in groups]
    differences = [worst(call(x, w), right) for call, right in zip(calls, want, strict=True)]

    def run(index: int) -> list[float]:
        return [worst(calls[index](x, w), want[index]) for _ in range(20)]

    with ThreadPoolExecutor(2) as pool:  # one that never ends is ended with the rank, which then shows all stacks
        differences += [one for found in pool.map(run, range(2)) for one in found]
    return max(differences), len(differences)


def many_groups(rank: int, world_size: int) -> tuple[float, int]:
    """nccl#2379, pytorch#192581: a group took another's place."""
    w = torch.randn(16, 16) / 8
    groups = [dist.new_group([0, 1] if index % 2 else [1, 0]).group_name for index in range(12)]

    def chain(x: Tensor) -> Tensor:
        for group in groups:
            x = row_parallel(x, w, group)
        return x

    x = torch.randn(4, 16)
    with watched_calls() as calls:
        difference = worst(compiled_by_us(chain, fullgraph=True)(x), chain(x))
    return difference, len({call.group for call in calls})


def views_of_inputs_leave(rank: int, world_size: int) -> tuple[float, int]:
    """pytorch#184002: a compiled function returned an alias of its input."""
    x, w = torch.randn(4, 16), torch.randn(16, 16)

    def call(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return row_parallel(x, w), x.t(), x

    product, view, same = compiled_by_us(call)(x)
    num_aliases = sum(one.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for one in (view, same))
    return worst(product, row_parallel(x, w)), num_aliases


def placements_stay(rank: int, world_size: int) -> tuple[float, int]:
    """pytorch#108840: compiled parameters were replicated instead of sharded."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 16))
    parallelize_module(model, init_device_mesh("cpu", (world_size,)), {"0": ColwiseParallel(), "1": RowwiseParallel()})
    before = [one.placements for one in model.parameters()]
    x = same_on_all(8, 16)
    with torch.enable_grad():
        out = compiled_by_us(model)(x)
        out.sum().backward()
    after = [one.placements for one in model.parameters()] + [one.grad.placements for one in model.parameters()]
    return worst(out.detach(), model(x)), sum(now == then for now, then in zip(after, before * 2, strict=True))


def no_rows(rank: int, world_size: int) -> tuple[float, int]:
    """sglang#25397: no tokens at all."""
    w, none = torch.randn(16, 16), torch.ones(0, 16)
    forms = (
        lambda x: row_parallel(x, w),
        lambda x: funcol.reduce_scatter_tensor(x @ w, "sum", 0, "0"),
        lambda x: funcol.all_gather_tensor(x, 0, "0") @ w,
    )
    return 0.0, sum(compiled_by_us(form, dynamic=False)(none).shape == (0, 16) for form in forms)


# A case, and the number that it returns besides the largest difference.
NUMBERS = {
    result_in_flight_enters: 1,
    local_tensor_in_flight_enters: 1,
    threads_with_groups_of_their_own: 42,
    many_groups: 12,
    views_of_inputs_leave: 2,
    placements_stay: 8,
    no_rows: 3,
}
CASES = {case.__name__: number for case, number in NUMBERS.items()}


def without_gradients(rank: int, world_size: int, *, case: Any) -> tuple[float, int]:
    with torch.no_grad():
        return case(rank, world_size)


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return run_cases({case.__name__: partial(without_gradients, case=case) for case in NUMBERS}, 2, timeout_s=500.0)


@pytest.mark.parametrize("name", CASES)
def test_it_is_right_here(outcomes: Outcomes, name: str) -> None:
    for difference, number in outcomes.values(name):
        assert difference < 1e-3
        assert number == CASES[name]
