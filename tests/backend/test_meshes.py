"""Two-dimensional meshes on four ranks: each operator has the right sub-group; the collectives of FSDP and DDP stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.backend.calls import ALWAYS, Compared, Layer, compare, same_on_all
from tests.spawn import Outcomes, run_cases

WORLD = 4


def mesh_of(world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))


def name_of(mesh: DeviceMesh) -> str:
    return mesh.get_group().group_name


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(3)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(Mlp(), mesh["tp"], plan)


def fsdp_and_tp(rank: int, world_size: int) -> tuple[Compared, str]:
    mesh = mesh_of(world_size)
    x = same_on_all(8, 16, seed=mesh.get_local_rank("dp"))
    model = nn.Sequential(tensor_parallel(mesh), tensor_parallel(mesh))
    for block in model:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])

    def compiled() -> list[Tensor]:
        for block in model:
            block.compile(backend="mkernel", options=ALWAYS)
        return [model(x)]

    return compare(model, lambda: [model(x)], compiled), name_of(mesh["tp"])


def ddp_and_tp(rank: int, world_size: int) -> tuple[Compared, str]:
    mesh = mesh_of(world_size)
    x = same_on_all(8, 16, seed=mesh.get_local_rank("dp"))
    torch.manual_seed(mesh.get_local_rank("tp"))
    group = name_of(mesh["tp"])
    model = nn.Sequential(Layer(group), Layer(group))
    parallel = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    call = torch.compile(parallel, backend="mkernel", options=ALWAYS)
    return compare(model, lambda: [parallel(x)], lambda: [call(x)]), group


def two_groups_in_one_graph(rank: int, world_size: int) -> tuple[Compared, tuple[str, str]]:
    mesh = mesh_of(world_size)
    tp, dp = name_of(mesh["tp"]), name_of(mesh["dp"])
    x, w = torch.randn(8, 16), torch.randn(16, 16)

    def call(x: Tensor) -> Tensor:
        return funcol.all_reduce(funcol.all_reduce(x @ w, "sum", tp) @ w, "sum", dp)

    with torch.no_grad():
        compiled = torch.compile(call, backend="mkernel", fullgraph=True, options=ALWAYS)
        return compare(nn.Module(), lambda: [call(x)], lambda: [compiled(x)]), (tp, dp)


CASES: dict[str, Any] = {case.__name__: case for case in (fsdp_and_tp, ddp_and_tp, two_groups_in_one_graph)}


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return run_cases(CASES, WORLD, timeout_s=570.0)


@pytest.mark.parametrize("name", ["fsdp_and_tp", "ddp_and_tp"])
def test_data_and_tensor_parallel(outcomes: Outcomes, name: str) -> None:
    for compared, tp in outcomes.values(name):
        assert compared.worst < 1e-4
        assert set(compared.groups) == {tp}
        assert len(compared.groups) >= 3


def test_two_groups_do_not_mix(outcomes: Outcomes) -> None:
    for compared, groups in outcomes.values("two_groups_in_one_graph"):
        assert compared.worst < 1e-2
        assert compared.groups == groups
