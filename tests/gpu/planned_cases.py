"""Results that stay in the graph are stored into by peers: the same bits as staged ones, and as near to the truth.

Bits are compared between code that Inductor compiled in its deterministic mode. Otherwise it times each layer norm in
two forms, one of whole rows and one of parts, and takes the faster one: another order of the sum in each compilation.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from mkcompile.backend import with_pass
from mkcompile.config import Options, ResultPolicy
from mkcompile.passes.fusion_pass import FusionPass
from mkcompile.runtime.external import Blueprint
from tests.gpu.compiled_cases import Problem, compare, gradients_of
from tests.gpu.pair import Pair, kernels_only

#: Its all-reduces are too large for the kernels of few rows, which place no results.
LARGE = Problem(batch=2, length=1024, width=8192, hidden=4096, sequence=False)
#: The same without GPUs, where the script itself is tried.
SMALL = Problem(batch=2, length=64, width=128, hidden=256, sequence=False)

Backend = Callable[..., Callable[..., Any]]


def backend_with(results: ResultPolicy, deterministic: bool) -> Backend:
    """The backend of kernels; what it is told and whether Inductor may choose by time."""

    def backend(gm: fx.GraphModule, inputs: Sequence[Any], **keywords: Any) -> Callable[..., Any]:
        # where bits are compared: what is added to a residual in place is rounded before Inductor's norm reads it
        options = Options(results=results, residuals="apart" if deterministic else "in_place")
        fusion = FusionPass(options, kernels_only, facts="kernels only")
        patches = with_pass({"deterministic": deterministic}, fusion)
        compiled: Callable[..., Any] = compile_fx(gm, inputs, config_patches=patches)  # type: ignore[assignment]
        return compiled

    return backend


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


def _kinds(pair: Pair) -> Counter[str]:
    """Launches of each kind of all-reduce so far, by the argument blocks that were made."""
    counted: Counter[str] = Counter()
    for one in pair.launcher.operations("gemm_all_reduce"):
        counted[one.kernel.config.broadcast] += len(one.launches)
        if one.otherwise is not None:
            counted["without room"] += len(one.otherwise.launches)
    return counted


def _compiled(model: nn.Module, backend: Backend) -> Callable[[Tensor], Tensor]:
    torch._dynamo.reset()
    compiled: Callable[[Tensor], Tensor] = torch.compile(model, backend=backend, fullgraph=True)
    return compiled


def _apart(one: Tensor, other: Tensor) -> str:
    """How far two results are from each other, and where the first difference is."""
    differ = (one != other).flatten()
    distance = (one.float() - other.float()).norm() / other.float().norm()
    return f"{int(differ.sum())} of {one.numel()} elements, {distance:.2e}, first at {int(differ.int().argmax())}"


def planned_results(pair: Pair) -> dict[str, Any]:
    """Forward and backward have the bits of the staged step.

    Steps 3 and 4 find no room. Outputs of all steps are kept and looked at again at the end: nothing was stored into
    them later.
    """
    problem = LARGE if pair.on_gpu else SMALL
    model = problem.parallel(pair, problem.model(pair))
    planned = _compiled(model, backend_with("planned", deterministic=True))
    steps = [problem.inputs(pair, seed=10 * step) for step in range(7)]
    found, copies = [], []
    for step, (x, dy) in enumerate(steps):
        with no_room(pair) if pair.on_gpu and step in (3, 4) else nullcontext():
            found.append(gradients_of(model, planned, x, dy))
        copies.append({name: value.clone() for name, value in found[-1].items()})
    kinds = _kinds(pair)
    staged = _compiled(model, backend_with("ordinary", deterministic=True))
    wanted = [gradients_of(model, staged, x, dy) for x, dy in steps]
    wrong = []
    for step, (one, copy_of_it, other) in enumerate(zip(found, copies, wanted, strict=True)):
        for name, value in one.items():
            if not torch.equal(value, copy_of_it[name]):
                wrong.append(f"step {step}: {name} has changed since: {_apart(value, copy_of_it[name])}")
            if not torch.equal(copy_of_it[name], other[name]):
                wrong.append(f"step {step}: {name} is not the staged one: {_apart(copy_of_it[name], other[name])}")
    assert not wrong, f"{len(wrong)} differ: {'; '.join(wrong[:6])}"
    if pair.on_gpu:
        assert kinds["direct"] and kinds["without room"], kinds
    return {"launches": dict(kinds), "held_mib": pair.launcher.held_bytes() >> 20}


def _reductions() -> list[str]:
    """The forms that were chosen so far for layer norms behind a sum."""
    kernels = [one for one in gc.get_objects() if type(one) is CachingAutotuner and one.launchers]
    names = [(one.inductor_meta.get("kernel_name", ""), one.launchers[0].config) for one in kernels]
    return sorted(f"{name}: {config}" for name, config in names if name.startswith("triton_red") and "add" in name)


def planned_results_judged(pair: Pair) -> dict[str, Any]:
    """Compiled as users do: every tensor as near to the truth as eager's; and how far compilations are apart."""
    problem = LARGE if pair.on_gpu else SMALL
    ratios = compare(problem, pair, lambda model: _compiled(model, backend_with("planned", deterministic=False)))
    model, (x, dy) = problem.parallel(pair, problem.model(pair)), problem.inputs(pair, seed=10)
    found, reductions = [], []
    with inductor_config.patch(force_disable_caches=True):  # a cached choice would be the same
        for results in ("planned", "ordinary", "ordinary"):
            found.append(gradients_of(model, _compiled(model, backend_with(results, deterministic=False)), x, dy))
            reductions.append(_reductions())
    planned, staged, again = found
    apart = {
        f"{name}, {kind}": _apart(one[name], other[name])
        for kind, one, other in (("planned and staged", planned, staged), ("staged twice", again, staged))
        for name in ("y", "dx")
    }
    return {"ratios": ratios, "apart": apart, "launches": dict(_kinds(pair)), "reductions": reductions}


CASES = {"planned_results": planned_results, "planned_results_judged": planned_results_judged}
