"""Dimensions that a mesh does not divide: the collective stays on all ranks, for one reason, and values are right."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import mkcompile
from mkcompile.passes.reason import Reason
from mkcompile.passes.uneven_shards import _parts, sizes_within, uneven_sizes
from tests.backend.calls import ALWAYS, same_on_all, watched_calls
from tests.captured import fake_group
from tests.spawn import Outcomes, run_cases

Found = tuple[float, list[str]]


def _differences(module: nn.Module, gradient: Callable[[Callable[..., Tensor]], Tensor]) -> Found:
    wanted = gradient(module)
    with watched_calls() as calls:
        found = gradient(torch.compile(module, backend="mkernel", options=ALWAYS))
    return float((found - wanted).abs().max()), [call.NAME for call in calls]


def vocabulary(rank: int, world_size: int, size: int) -> Found:
    """A vocabulary-parallel head: its input's gradient is summed over products with k = the rank's part."""
    torch.manual_seed(3)
    head = parallelize_module(
        nn.Linear(16, size, bias=False),
        init_device_mesh("cpu", (world_size,)),
        ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    )

    def gradient(call: Callable[..., Tensor]) -> Tensor:
        x = same_on_all(8, 16).requires_grad_()
        with loss_parallel():
            nn.functional.cross_entropy(call(x), torch.arange(8)).backward()
        assert x.grad is not None
        return x.grad

    return _differences(head, gradient)


def rows_of_the_weight(rank: int, world_size: int) -> Found:
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (world_size,))
    module = parallelize_module(nn.Linear(25, 16), mesh, RowwiseParallel(output_layouts=Shard(0)))
    x = distribute_tensor(same_on_all(8, 25), mesh, [Shard(-1)])
    with torch.no_grad():
        return _differences(module, lambda call: call(x))


def hidden_features(rank: int, world_size: int) -> Found:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(16, 25, bias=False), nn.ReLU(), nn.Linear(25, 16, bias=False))
    plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
    parallelize_module(module, init_device_mesh("cpu", (world_size,)), plan)
    with torch.no_grad():
        return _differences(module, lambda call: call(same_on_all(8, 16)))


CASES = {
    "odd": partial(vocabulary, size=49), "even": partial(vocabulary, size=48), "rows": rows_of_the_weight,
    "hidden": hidden_features,
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return run_cases(CASES, 2, environment={"MKCOMPILE_TIMEOUT_S": "10"}, timeout_s=400.0)


@pytest.mark.parametrize("name", ["odd", "rows", "hidden"])
def test_parts_of_other_sizes_are_reduced_as_they_were(outcomes: Outcomes, name: str) -> None:
    for difference, calls in outcomes.values(name):
        assert difference < 1e-5
        assert calls == []


def test_equal_parts_are_fused(outcomes: Outcomes) -> None:
    for difference, calls in outcomes.values("even"):
        assert difference < 1e-5
        assert calls == ["gemm_all_reduce"]


def test_explain_names_the_dimension_that_is_not_divided() -> None:
    with fake_group(2):
        module = nn.Sequential(nn.Linear(16, 25, bias=False), nn.ReLU(), nn.Linear(25, 16, bias=False))
        plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
        parallelize_module(module, init_device_mesh("cpu", (2,)), plan)
        with torch.no_grad():
            report = mkcompile.explain(module, torch.randn(8, 16), options=ALWAYS)
        (site,) = report.collectives
        assert site.reason is Reason.UNEVEN_SHARDS


@pytest.mark.parametrize(
    ("size", "num_ranks", "parts"),
    [(49, 2, {25, 24}), (48, 2, {24}), (9, 4, {3, 0}), (10, 4, {3, 1}), (2, 4, {1, 0}), (0, 2, {0})],
)
def test_parts_are_those_of_chunk(size: int, num_ranks: int, parts: set[int]) -> None:
    assert _parts(size, num_ranks) == parts
    chunks = [one.numel() for one in torch.empty(size).chunk(num_ranks)]
    assert {*chunks, *([0] if len(chunks) < num_ranks else [])} == parts


def test_sizes_belong_to_the_groups_whose_ranks_differ() -> None:
    with fake_group(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        dp, tp = (mesh.get_group(name).group_name for name in ("dp", "tp"))
        graph = fx.GraphModule({}, fx.Graph())
        node = graph.graph.placeholder("x")
        for whole, placements, sizes in (
            ((64, 16), [Shard(0), Shard(0)], {}),
            ((50, 16), [Shard(0), Shard(0)], {dp: {7, 4, 112, 64}, tp: {7, 4, 112, 64}}),
            ((50, 16), [Shard(0), Shard(1)], {}),
            ((5, 16), [Shard(0), Replicate()], {dp: {3, 2, 48, 32}}),
            ((50, 17), [Replicate(), Shard(-1)], {tp: {5, 2, 250, 100}}),
            ((4, 49, 6), [Replicate(), Shard(1)], {tp: {13, 10, 52, 40, 78, 60, 312, 240}}),
            ((1, 16), [Shard(0), Replicate()], {}),
        ):
            stride = torch.empty(whole).stride()
            local = torch.empty((1,) * len(whole))
            node.meta["example_value"] = DTensor.from_local(
                local, mesh, placements, shape=torch.Size(whole), stride=stride, run_check=False
            )
            found = uneven_sizes(graph)
            assert {group: set(numbers) for group, numbers in found.items()} == sizes, (whole, placements)
            assert sizes_within(found, tp) == sizes.get(tp, set())
            everyone = set().union(*sizes.values())
            assert sizes_within(found, "0") == everyone, "a group over both has ranks of either that differ"
