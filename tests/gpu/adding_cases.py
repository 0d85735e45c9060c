"""Reductions added to a residual in place, by two processes: the bits of a sum that is stored, and added then."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mkcompile.runtime.adding import Adding
from tests.gpu.compiled_cases import Mlp, Problem
from tests.gpu.pair import KERNELS, Pair, Product, backend_of_kernels

#: Rows of the GEMM: kernels for few rows, which only store, and for many, which add.
ROWS = (16, 384, 2048, 8190)
REPLAYS = 20


def add(pair: Pair, product: Product, residual: Tensor, operands: tuple[Tensor, Tensor, Tensor | None]) -> None:
    """The operator in place; the residual [rows, n] is this rank's own."""
    (x, w, bias), world = operands, pair.world_size
    end = "avg" if product.average else "sum", world, pair.group, ""
    if product.operator == "gemm_all_reduce":
        assert torch.ops.mkcompile.gemm_all_reduce_add(residual, [x], [w], bias, *end) is None
        return
    shape = [product.outer, product.m(world) // product.outer, product.n]
    whole = residual.view(product.outer, -1, product.n)
    assert torch.ops.mkcompile.gemm_reduce_scatter_add(whole, [x], [w], bias, shape, 1, *end) is None


def _residual(pair: Pair, product: Product, offset: int = 0) -> Tensor:
    """Another one on each rank; `offset` elements behind what is aligned."""
    drawn = 8 * pair.draw(product.rows, product.n, seed=77 + product.seed, dtype=product.dtype)
    memory = torch.empty(drawn.numel() + offset, dtype=drawn.dtype, device=drawn.device)
    return memory[offset:].view_as(drawn).copy_(drawn)


def _products(pair: Pair) -> list[Product]:
    rows = ROWS if pair.on_gpu else ROWS[:2]
    scattered = pair.world_size
    products = [
        Product(operator=op, rows=m // (scattered if op == "gemm_reduce_scatter" else 1), n=1032, k=264, seed=i)
        for op in KERNELS
        for i, m in enumerate(rows)
    ]
    kinds: list[dict[str, Any]] = [
        {"layout": "kn", "bias": True}, {"dtype": torch.float16, "sliced": True}, {"average": True}
    ]  # fmt: skip
    products += [Product(operator=op, rows=384, n=776, k=328, seed=9, **kind) for op in KERNELS for kind in kinds]
    return [*products, Product(operator="gemm_reduce_scatter", rows=3 * 700, n=1032, k=264, outer=3, seed=4)]


def added(pair: Pair) -> dict[str, Any]:
    """Sizes, layouts, dtypes and segments; on one rank only, also into memory that tiles can't reach."""
    products = _products(pair)
    for number, product in enumerate(products):
        operands = product.inputs(pair, pair.rank)
        out = product.call(pair, *operands)
        product.check(pair, out)
        for offset in (0, 0, 1 if pair.rank == number % 2 else 0):
            residual = _residual(pair, product, offset)
            wanted = residual + out
            if number % 8 == 0:
                pair.poison()
            add(pair, product, residual, operands)
            differ = int((residual != wanted).sum())
            assert not differ, f"{product.name}, offset {offset}: {differ} of {wanted.numel()} elements differ"
    for operator in KERNELS:
        pair.expect_launches(f"{operator}_add", at_least=3 * sum(one.operator == operator for one in products))
    kinds = Counter("native" if one.native is not None else "store only" for one in _adding(pair))
    if pair.on_gpu:
        assert kinds["native"] >= 2 * len(KERNELS) and kinds["store only"], kinds
    return {"products": len(products), "launched": dict(pair.launcher.launched), "kinds": dict(kinds)}


def _adding(pair: Pair) -> list[Adding]:
    return [one for one in pair.launcher._operations.values() if isinstance(one, Adding)]


def replayed(pair: Pair) -> dict[str, Any]:
    """A graph with both operators adds at each replay; eager calls lie in between."""
    products = [
        Product(operator=op, rows=2048 // (2 if op == "gemm_reduce_scatter" else 1), n=1032, k=264, integers=True)
        for op in KERNELS
    ]
    operands = [product.inputs(pair, pair.rank) for product in products]
    outs = [product.call(pair, *given) for product, given in zip(products, operands, strict=True)]
    residuals = [torch.zeros_like(out) for out in outs]

    def step() -> None:
        for product, residual, given in zip(products, residuals, operands, strict=True):
            add(pair, product, residual, given)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    pair.meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    pair.meet()
    wanted = [out.clone() for out in outs]
    for replay in range(REPLAYS):
        graph.replay()
        wanted = [one + out for one, out in zip(wanted, outs, strict=True)]
        if replay % 5 == 4:
            step()
            wanted = [one + out for one, out in zip(wanted, outs, strict=True)]
        for product, residual, expected in zip(products, residuals, wanted, strict=True):
            assert torch.equal(residual, expected), f"replay {replay}: {product.name}"
    return {"replays": REPLAYS}


def _compiled(pair: Pair, sequence: bool) -> dict[str, Any]:
    """Inference of four blocks, of which the last three add to what the one before has made."""
    torch._dynamo.reset()
    sizes = (1024, 8192, 4096) if pair.on_gpu else (64, 128, 256)
    problem = Problem(batch=2, length=sizes[0], width=sizes[1], hidden=sizes[2], sequence=sequence)
    torch.manual_seed(7)
    blocks = nn.Sequential(*(Mlp(problem.width, problem.hidden) for _ in range(4))).to(pair.device, torch.bfloat16)
    exact = copy.deepcopy(blocks).float()
    eager = problem.parallel(pair, blocks)
    forward = torch.compile(eager, backend=backend_of_kernels, fullgraph=True)
    worst = 0.0
    with torch.no_grad():
        for step in range(4):
            whole_x, _ = problem.inputs(pair, seed=10 * step)
            x = problem.own(pair, whole_x)
            before = x.clone()
            truth = problem.own(pair, exact(whole_x.float()))
            got, again, reference = forward(x), forward(x), eager(x)
            assert torch.equal(x, before), "the model's input is not a residual to add to"
            assert torch.equal(got, again), "two runs, the same bits"
            error, allowed = (((one.float() - truth).norm() / truth.norm()).item() for one in (got, reference))
            assert error <= 1.2 * allowed + 1e-4, f"step {step}: error {error:.3g}, eager's {allowed:.3g}"
            worst = max(worst, error / max(allowed, 1e-12))
        replays = _replay(pair, forward, x, got) if pair.on_gpu else 0
    operator = "gemm_reduce_scatter" if sequence else "gemm_all_reduce"
    pair.expect_launches(f"{operator}_add", at_least=3)
    return {"worst_error_over_eager": round(worst, 3), "replays": replays, "launched": dict(pair.launcher.launched)}


def _replay(pair: Pair, forward: Callable[[Tensor], Tensor], x: Tensor, wanted: Tensor) -> int:
    """A captured step has the bits of the others each time, eager steps in between."""
    pair.meet()
    graph, still = torch.cuda.CUDAGraph(), x.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward(still)
    torch.cuda.current_stream().wait_stream(stream)
    pair.meet()
    with torch.cuda.graph(graph):
        out = forward(still)
    for replay in range(REPLAYS):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, wanted), f"replay {replay}"
        if replay % 5 == 4:
            assert torch.equal(forward(x), wanted), f"eager step after replay {replay}"
    return REPLAYS


def compiled(pair: Pair) -> dict[str, Any]:
    """All-reduces."""
    return _compiled(pair, sequence=False)


def compiled_sequence(pair: Pair) -> dict[str, Any]:
    """Reduce-scatters along the sequence, in segments."""
    return _compiled(pair, sequence=True)


CASES = {"added": added, "replayed": replayed, "compiled": compiled, "compiled_sequence": compiled_sequence}
