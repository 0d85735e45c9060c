"""Collectives of ranks that share one GPU, tried on the CPU, where gloo's are there to compare with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks import by_turns
from tests.spawn import Case, Outcomes, run_cases

_PIECE_BYTES = 4096  # of which most messages here are several


@contextmanager
def _installed() -> Iterator[list[str]]:
    """Names of the collectives that came through buffers."""
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    called: list[str] = []
    exchange = by_turns.Buffers.exchange

    def counted(self: by_turns.Buffers, x: Tensor, take: by_turns.Take) -> None:
        called.append(str(tuple(x.shape)))
        exchange(self, x, take)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(by_turns.Buffers, "exchange", counted)
        library = by_turns.install(torch.device("cpu"), _PIECE_BYTES)
        try:
            yield called
        finally:
            library._destroy()  # type: ignore[no-untyped-call]


def _own(rank: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(31 * rank + 1)).to(dtype)


def _collectives(rank: int) -> dict[str, Tensor]:
    """One of each, of several sizes and dtypes."""
    assert dist.group.WORLD is not None
    ops, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    found: dict[str, Tensor] = {}
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = _own(rank, 96, 130, dtype=dtype)
        found[f"sum {dtype}"] = ops.all_reduce(x, "sum", name)
        found[f"scattered {dtype}"] = ops.reduce_scatter_tensor(x, "sum", 2, name)
        found[f"gathered {dtype}"] = ops.all_gather_into_tensor(x, 2, name)
    many = [_own(rank, n, 8) for n in (2, 600)]
    listed = {
        "sums": ops.all_reduce_coalesced([one.clone() for one in many], "sum", name),
        "sums in place": ops.all_reduce_coalesced_([one.clone() for one in many], "sum", name),
        "gathers": ops.all_gather_into_tensor_coalesced(many, 2, name),
        "scatters": ops.reduce_scatter_tensor_coalesced(many, "sum", 2, name),
    }
    found |= {f"{key} {i}": one for key, ones in listed.items() for i, one in enumerate(ones)}
    found["in place"] = ops.all_reduce_(many[1].clone(), "sum", name)
    found["number"] = ops.all_reduce(torch.tensor(rank + 1.5), "sum", name)
    found["integers"] = ops.all_reduce(torch.arange(9) + (1 << 40) * rank, "sum", name)
    return {key: ops.wait_tensor(one) for key, one in found.items()}


def same_as_gloo(rank: int, world_size: int) -> int:
    wanted = _collectives(rank)
    with _installed() as called:
        found = _collectives(rank)
    for name, one in wanted.items():
        assert torch.equal(found[name], one) and found[name].dtype == one.dtype, name
    return len(called)


class Mlp(nn.Module):
    """Widths divide among two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return out


def _steps(forward: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = forward(x)
    gradients = torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
    return [y.detach(), *(one.to_local() if isinstance(one, DTensor) else one for one in gradients)]


def a_sharded_model_trains(rank: int, world_size: int, backend: str) -> int:
    """Eager DTensors and what a compiler makes of them."""
    torch.manual_seed(7)
    mesh = init_device_mesh("cpu", (world_size,))
    plan = {
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=True),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=True),
    }
    model = parallelize_module(Mlp(), mesh, plan)
    x = _own(rank, 2, 8, 32, dtype=torch.float32)
    wanted = _steps(model, model, x)
    with _installed() as called:
        eager = _steps(model, model, x)
        num_eager = len(called)
        compiled = _steps(torch.compile(model, backend=backend, fullgraph=True), model, x)
        num_compiled = len(called) - num_eager
    assert num_eager >= 4 and num_compiled >= 4, (num_eager, num_compiled)
    for found in (eager, compiled):
        torch.testing.assert_close(found, wanted)
    return num_compiled


CASES: dict[str, Case] = {
    "same_as_gloo": same_as_gloo,
    "a_sharded_model_trains": functools.partial(a_sharded_model_trains, backend="aot_eager"),
}
SLOW: dict[str, Case] = {"inductor": functools.partial(a_sharded_model_trains, backend="inductor")}


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return run_cases(CASES, world_size=2)


@pytest.mark.parametrize("name", CASES)
def test_ranks_on_one_device(outcomes: Outcomes, name: str) -> None:
    assert min(outcomes.values(name)) > 0


@pytest.mark.slow
def test_code_that_inductor_makes() -> None:
    assert min(run_cases(SLOW, world_size=2).values("inductor")) > 0
