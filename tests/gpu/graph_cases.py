"""CUDA graphs: captured steps, replayed with other inputs; a capture that comes too early."""

from __future__ import annotations

from typing import Any

import torch

from mkcompile.errors import WorkspaceError
from tests.gpu.compiled_cases import Problem
from tests.gpu.pair import KERNELS, Pair, Product, backend_of_kernels
from tests.gpu.planned_cases import LARGE, backend_with, no_room

REPLAYS = 100


def operators_replayed(pair: Pair) -> dict[str, Any]:
    """Both operators in one graph; each replay has other inputs and is checked exactly; eager calls lie in between."""
    products = [Product(operator=op, rows=256, n=520, k=136, integers=True, seed=1) for op in KERNELS]
    still = [tuple(t.clone() if t is not None else None for t in one.inputs(pair, pair.rank)) for one in products]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for product, operands in zip(products, still, strict=True):
            product.call(pair, *operands)
    torch.cuda.current_stream().wait_stream(stream)
    pair.meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [product.call(pair, *operands) for product, operands in zip(products, still, strict=True)]
    pair.meet()
    for replay in range(REPLAYS):
        fresh = [
            Product(operator=one.operator, rows=one.rows, n=one.n, k=one.k, integers=True, seed=replay + 2)
            for one in products
        ]
        for product, operands in zip(fresh, still, strict=True):
            for target, source in zip(operands, product.inputs(pair, pair.rank), strict=True):
                if target is not None:
                    target.copy_(source)
        graph.replay()
        for product, out in zip(fresh, outs, strict=True):
            truth = product.expected(pair)[0]
            assert torch.equal(out.float(), truth), f"replay {replay}, {product.name}"
        if replay % 10 == 0:
            again = fresh[0].call(pair, *fresh[0].inputs(pair, pair.rank))
            assert torch.equal(again, outs[0]), f"eager call after replay {replay}"
    return {"replays": REPLAYS}


def _stepped(pair: Pair, mode: str | None, sequence: bool) -> dict[str, Any]:
    """A forward pass, again and again with other inputs, in a graph that Inductor (`mode`) or that we capture."""
    torch._dynamo.reset()
    problem = Problem(batch=2, length=256, width=1024, hidden=2048, sequence=sequence)
    model = problem.parallel(pair, problem.model(pair))
    forward = torch.compile(model, backend=backend_of_kernels, **({"mode": mode} if mode else {}))
    still = problem.own(pair, pair.draw(2, 256, 1024, seed=0, rank=0)).clone()
    worst = 0.0
    with torch.no_grad():
        if mode is None:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    forward(still)
            torch.cuda.current_stream().wait_stream(stream)
            pair.meet()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = forward(still)
        for replay in range(REPLAYS):
            x = problem.own(pair, pair.draw(2, 256, 1024, seed=replay + 1, rank=0))
            if mode is None:
                still.copy_(x)
                graph.replay()
            else:
                torch.compiler.cudagraph_mark_step_begin()
                out = forward(x)
            if replay % 10 == 0:
                eager = model(x)
                error = ((out.float() - eager.float()).norm() / eager.float().norm()).item()
                assert error < 1e-2, f"replay {replay}: {error:.3g}"
                worst = max(worst, error)
    pair.meet()
    for operator in ("all_gather_gemm", "gemm_reduce_scatter") if sequence else ("gemm_all_reduce",):
        pair.expect_launches(operator, at_least=2)
    return {"replays": REPLAYS, "worst_difference_from_eager": worst, "launched": dict(pair.launcher.launched)}


def compiled_step_captured(pair: Pair) -> dict[str, Any]:
    """A compiled model in a graph that the user captures."""
    return _stepped(pair, None, sequence=False)


def reduce_overhead(pair: Pair) -> dict[str, Any]:
    """The graphs that Inductor captures itself."""
    return _stepped(pair, "reduce-overhead", sequence=False)


def sequence_step_captured(pair: Pair) -> dict[str, Any]:
    """The same of a sequence-parallel model: gathers and reduce-scatters."""
    return _stepped(pair, None, sequence=True)


def sequence_reduce_overhead(pair: Pair) -> dict[str, Any]:
    """The same of a sequence-parallel model."""
    return _stepped(pair, "reduce-overhead", sequence=True)


def capture_without_warm_up(pair: Pair) -> dict[str, Any]:
    """A typed error that says what to do; afterwards the same call works. No other case has loaded their kernels."""
    texts: dict[str, Any] = {}
    for operator in KERNELS:
        rows = 16384 // (pair.world_size if operator == "gemm_reduce_scatter" else 1)
        product = Product(operator=operator, rows=rows, n=16384, k=64, seed=3, dtype=torch.float16)
        operands = product.inputs(pair, pair.rank)
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                product.call(pair, *operands)
        except WorkspaceError as error:
            texts[operator] = str(error)
        assert "warm up first" in texts.get(operator, ""), f"no error from {operator}: {texts}"
        pair.meet()
        small = Product(operator=operator, rows=128, n=256, k=64, integers=True, seed=4)
        small.check(pair, small.call(pair, *small.inputs(pair, pair.rank)))
        product.check(pair, product.call(pair, *operands))
    return texts


def planned_results_replayed(pair: Pair) -> dict[str, Any]:
    """Two graphs of compiled steps: one whose results are stored into by peers, one whose capture found no room.

    Each replay has the bits of the eager staged step; eager planned steps run in between, in places of their own.
    """
    torch._dynamo.reset()
    model = LARGE.parallel(pair, LARGE.model(pair))
    planned = torch.compile(model, backend=backend_with("planned", deterministic=True), fullgraph=True)
    staged = torch.compile(model, backend=backend_with("ordinary", deterministic=True), fullgraph=True)
    still = pair.draw(LARGE.batch, LARGE.length, LARGE.width, seed=0, rank=0)
    with torch.no_grad():
        staged(still)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                planned(still)
        torch.cuda.current_stream().wait_stream(stream)
        pair.meet()
        graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
        with torch.cuda.graph(graphs[0]):
            outs = [planned(still)]
        with no_room(pair), torch.cuda.graph(graphs[1]):
            outs.append(planned(still))
        for replay in range(REPLAYS):
            still.copy_(pair.draw(LARGE.batch, LARGE.length, LARGE.width, seed=replay + 1, rank=0))
            graphs[0].replay()
            graphs[1].replay()
            wanted = staged(still)
            if replay % 10 == 0:
                assert torch.equal(planned(still), wanted), f"replay {replay}: an eager planned step differs"
            assert torch.equal(outs[0], wanted), f"replay {replay}: planned results differ"
            assert torch.equal(outs[1], wanted), f"replay {replay}: results without room differ"
    made = [one for one in pair.launcher.operations("gemm_all_reduce") if one.otherwise is not None]
    assert made and all(one.launches and one.otherwise.launches for one in made), "both kinds were captured"
    return {"replays": REPLAYS, "held_mib": pair.launcher.held_bytes() >> 20}


CASES = {
    # first, so that the workspace is made while the graph's memory pool is in force
    "reduce_overhead": reduce_overhead,
    "operators_replayed": operators_replayed,
    "compiled_step_captured": compiled_step_captured,
    "sequence_reduce_overhead": sequence_reduce_overhead,
    "sequence_step_captured": sequence_step_captured,
    "planned_results_replayed": planned_results_replayed,
    "capture_without_warm_up": capture_without_warm_up,
}
