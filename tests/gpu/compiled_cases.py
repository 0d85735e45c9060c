"""Compiled models of two processes, forward and backward, against eager and against fp32 of the whole model.

Legend: B batch, S sequence, D features, H hidden features.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from mkcompile.backend import mkernel
from tests.gpu.pair import Pair, backend_of_kernels

Compile = Callable[[nn.Module], Callable[[Tensor], Tensor]]


class Mlp(nn.Module):
    """x + down(gelu(up(norm(x))))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Two blocks. `sequence`: the sequence is sharded between the blocks, else the activations are replicated."""

    batch: int
    length: int
    width: int
    hidden: int
    sequence: bool

    def model(self, pair: Pair) -> nn.Sequential:
        """The same weights on every rank, rounded to bf16."""
        torch.manual_seed(7)
        model = nn.Sequential(*(Mlp(self.width, self.hidden) for _ in range(2)))
        return model.to(pair.device, torch.bfloat16)

    def inputs(self, pair: Pair, seed: int) -> tuple[Tensor, Tensor]:
        """x and the gradient of the result, whole, the same on every rank."""
        shape = (self.batch, self.length, self.width)
        return pair.draw(*shape, seed=seed, rank=0), pair.draw(*shape, seed=seed + 1, rank=0)

    def own(self, pair: Pair, whole: Tensor) -> Tensor:
        """This rank's part of an activation."""
        return whole.chunk(pair.world_size, 1)[pair.rank].contiguous() if self.sequence else whole

    def parallel(self, pair: Pair, model: nn.Sequential) -> nn.Sequential:
        """The model over both ranks."""
        mesh = init_device_mesh(pair.device.type, (pair.world_size,), mesh_dim_names=("tp",))
        inside, outside = (Shard(1), Shard(1)) if self.sequence else (Replicate(), Replicate())
        plan = {
            "up": ColwiseParallel(input_layouts=inside, use_local_output=True),
            "down": RowwiseParallel(output_layouts=outside, use_local_output=True),
        }
        for block in model:
            parallelize_module(block, mesh, plan)
        return model


def gradients_of(model: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """y, dx and the weights' gradients (of this rank's shards)."""
    model.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_()
    y = forward(x)
    y.backward(dy)
    assert x.grad is not None
    found = {"y": y.detach(), "dx": x.grad}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradient = parameter.grad
        found[name] = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return found


def _truth(problem: Problem, pair: Pair, whole_x: Tensor, whole_dy: Tensor) -> dict[str, Tensor]:
    """The whole model in fp32; gradients of sharded weights are cut to this rank's part."""
    model = problem.model(pair).float()
    whole = gradients_of(model, model, whole_x.float(), whole_dy.float())
    parts: dict[str, Tensor] = {}
    for name, value in whole.items():
        if name in ("y", "dx"):
            parts[name] = problem.own(pair, value)
        elif name.endswith("up.weight"):
            parts[name] = value.chunk(pair.world_size, 0)[pair.rank]
        elif name.endswith("down.weight"):
            parts[name] = value.chunk(pair.world_size, 1)[pair.rank]
    return parts


def compare(problem: Problem, pair: Pair, compile_model: Compile, steps: int = 3) -> dict[str, float]:
    """Several steps with different inputs; each tensor's error at most twice eager's. Returns the worst ratios."""
    eager = problem.parallel(pair, problem.model(pair))
    compiled = copy.deepcopy(eager)
    forward = compile_model(compiled)
    ratios: dict[str, float] = {}
    for step in range(steps):
        whole_x, whole_dy = problem.inputs(pair, seed=10 * step)
        x, dy = problem.own(pair, whole_x), problem.own(pair, whole_dy)
        truth = _truth(problem, pair, whole_x, whole_dy)
        got = gradients_of(compiled, forward, x, dy)
        reference = gradients_of(eager, eager, x, dy)
        for name, exact in truth.items():
            assert torch.isfinite(got[name]).all(), f"step {step}: {name} is not finite"
            error, allowed = (((one[name].float() - exact).norm() / exact.norm()).item() for one in (got, reference))
            assert error <= 2 * allowed + 1e-4, f"step {step}: {name}: error {error:.3g}, eager's {allowed:.3g}"
            ratios[name] = max(ratios.get(name, 0.0), round(error / max(allowed, 1e-12), 3))
    return ratios


def _sizes(pair: Pair, sequence: bool) -> Problem:
    scale = 1 if pair.on_gpu else 16
    return Problem(batch=2, length=1024 // scale, width=2048 // scale, hidden=8192 // scale, sequence=sequence)


def _with_kernels(model: nn.Module) -> Callable[[Tensor], Tensor]:
    compiled: Callable[[Tensor], Tensor] = torch.compile(model, backend=backend_of_kernels, fullgraph=True)
    return compiled


def tensor_parallel(pair: Pair) -> dict[str, Any]:
    """All-reduces forward and backward."""
    ratios = compare(_sizes(pair, sequence=False), pair, _with_kernels)
    pair.expect_launches("gemm_all_reduce", at_least=2 * 3)
    return {"ratios": ratios, "launched": dict(pair.launcher.launched)}


def sequence_parallel(pair: Pair) -> dict[str, Any]:
    """Reduce-scatters along the sequence, with the batch in front of it."""
    torch._dynamo.reset()
    ratios = compare(_sizes(pair, sequence=True), pair, _with_kernels)
    pair.expect_launches("gemm_reduce_scatter", at_least=2 * 3)
    return {"ratios": ratios, "launched": dict(pair.launcher.launched)}


def every_operator(pair: Pair) -> dict[str, Any]:
    """The backend as users have it, `always`: what has no kernel yet runs by its reference in between."""
    torch._dynamo.reset()
    options = {"mkernel.fuse": "always"}
    ratios = {}
    for sequence in (False, True):
        ratios[str(sequence)] = compare(
            _sizes(pair, sequence), pair, lambda model: torch.compile(model, backend=mkernel, options=options)
        )
    return {"ratios": ratios, "launched": dict(pair.launcher.launched)}


def dynamic_length(pair: Pair) -> dict[str, Any]:
    """One compilation, many numbers of tokens."""
    torch._dynamo.reset()
    problem = _sizes(pair, sequence=False)
    model = problem.parallel(pair, problem.model(pair))
    forward = torch.compile(model, backend=backend_of_kernels, dynamic=True)
    with torch.no_grad():
        for length in (64, 17, 640, 128, 1000):
            x = pair.draw(1, length, problem.width, seed=length, rank=0)
            error = (forward(x).float() - model(x).float()).norm() / model(x).float().norm()
            assert error < 1e-2, f"{length} tokens: {error:.3g}"
    pair.expect_launches("gemm_all_reduce", at_least=10)
    return {"launched": dict(pair.launcher.launched)}


def one_token(pair: Pair) -> dict[str, Any]:
    """With the option of `max-autotune` for which Inductor writes products of one row as sums of products."""
    torch._dynamo.reset()
    problem = _sizes(pair, sequence=False)
    model = problem.parallel(pair, problem.model(pair))
    forward = torch.compile(model, backend=backend_of_kernels, options={"coordinate_descent_tuning": True})
    x = pair.draw(1, 1, problem.width, seed=3, rank=0)
    with torch.no_grad():
        error = (forward(x).float() - model(x).float()).norm() / model(x).float().norm()
    assert error < 1e-2, f"{error:.3g}"
    pair.expect_launches("gemm_all_reduce", at_least=2)
    return {"launched": dict(pair.launcher.launched)}


CASES = {
    "tensor_parallel": tensor_parallel,
    "sequence_parallel": sequence_parallel,
    "dynamic_length": dynamic_length,
    "every_operator": every_operator,
    "one_token": one_token,
}
