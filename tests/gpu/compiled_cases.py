"""Compiled models of two processes, forward and backward, against eager and against fp32 of the whole model.

Legend: B batch, S sequence, D features, H hidden features.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._inductor.compile_fx import compile_fx
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from mkcompile.backend import mkernel, with_pass
from mkcompile.config import Options
from mkcompile.passes.fusion_pass import FusionPass
from mkcompile.runtime.external import Blueprint
from tests.gpu.pair import Pair, backend_of_kernels, kernels_only

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


def _gradients(model: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> dict[str, Tensor]:
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
    whole = _gradients(model, model, whole_x.float(), whole_dy.float())
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
        got = _gradients(compiled, forward, x, dy)
        reference = _gradients(eager, eager, x, dy)
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


def backend_that_plans_results(gm: fx.GraphModule, inputs: Sequence[Any], **keywords: Any) -> Callable[..., Any]:
    """The backend of kernels, with results in symmetric memory."""
    fusion = FusionPass(Options(results="planned"), kernels_only, facts="kernels only")
    compiled: Callable[..., Any] = compile_fx(gm, inputs, config_patches=with_pass({}, fusion))  # type: ignore[assignment]
    return compiled


@contextmanager
def no_room(pair: Pair, gap_bytes: int = 1 << 16) -> Iterator[None]:
    """Until the end no planned result of more than `gap_bytes` bytes finds a place; the same on every rank."""
    results = pair.launcher.workspace(pair.group, pair.device).results
    limit_bytes, results._limit_bytes = results._limit_bytes, results.held_bytes
    filler = Blueprint((gap_bytes // 2,), (1,), torch.bfloat16, pair.device)
    stream = torch.cuda.current_stream().cuda_stream
    held = []
    while (taken := results.take(filler, stream, 0)) is not None:
        held.append(taken)
    try:
        yield
    finally:
        held.clear()
        results._limit_bytes = limit_bytes


#: Its all-reduces are too large for the kernels of few rows, which place no results.
LARGE = Problem(batch=2, length=1024, width=8192, hidden=4096, sequence=False)


def _kinds(pair: Pair) -> Counter[str]:
    """Launches of each kind of all-reduce so far, by the argument blocks that were made."""
    counted: Counter[str] = Counter()
    for one in pair.launcher.operations("gemm_all_reduce"):
        counted[one.kernel.config.broadcast] += len(one.launches)
        if one.otherwise is not None:
            counted["without room"] += len(one.otherwise.launches)
    return counted


def planned_results(pair: Pair) -> dict[str, Any]:
    """Results that stay in the graph are stored into by peers: the same bits as staged ones, forward and backward.

    Steps 3 and 4 find no room. Outputs of all steps are kept and looked at again at the end: nothing was stored into
    them later.
    """
    torch._dynamo.reset()
    problem = LARGE
    model = problem.parallel(pair, problem.model(pair))
    planned = torch.compile(model, backend=backend_that_plans_results, fullgraph=True)
    steps = [problem.inputs(pair, seed=10 * step) for step in range(7)]
    found = []
    for step, (x, dy) in enumerate(steps):
        with no_room(pair) if pair.on_gpu and step in (3, 4) else nullcontext():
            found.append(_gradients(model, planned, x, dy))
    copies = [{name: value.clone() for name, value in one.items()} for one in found]
    kinds = _kinds(pair)
    torch._dynamo.reset()
    staged = torch.compile(model, backend=backend_of_kernels, fullgraph=True)
    wanted = [_gradients(model, staged, x, dy) for x, dy in steps]
    for step, (one, copy_of_it, other) in enumerate(zip(found, copies, wanted, strict=True)):
        for name, value in one.items():
            apart = (value.float() - other[name].float()).norm() / other[name].float().norm()
            assert torch.equal(value, other[name]), f"step {step}: {name} differs from the staged one by {apart:.2e}"
            assert torch.equal(value, copy_of_it[name]), f"step {step}: {name} has changed since"
    if pair.on_gpu:
        assert kinds["direct"] and kinds["without room"], kinds
    return {"launches": dict(kinds), "held_mib": pair.launcher.held_bytes() >> 20}


CASES = {
    "tensor_parallel": tensor_parallel,
    "planned_results": planned_results,
    "sequence_parallel": sequence_parallel,
    "dynamic_length": dynamic_length,
    "every_operator": every_operator,
}
