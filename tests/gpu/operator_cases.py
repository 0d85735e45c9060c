"""Operator calls of two processes against fp32: sizes, layouts, dtypes, growth of the workspace, cost on the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from mkcompile.ops.registry import call_types
from tests.gpu.pair import KERNELS, Pair, Product

ROWS = (1, 2, 16, 17, 63, 64, 65, 127, 128, 129, 255, 1000, 2048, 4097, 8192)


def _run(pair: Pair, products: list[Product]) -> dict[str, Any]:
    """Each product: NaN in the staging before, two runs with equal bits, checked; the worst ratio of errors."""
    worst = 0.0
    for number, product in enumerate(products):
        operands = product.inputs(pair, pair.rank)
        first = product.call(pair, *operands)
        if number % 8 == 0:
            pair.poison()
        again = product.call(pair, *operands)
        worst = max(worst, product.check(pair, again))
        assert torch.equal(first, again), f"{product.name}: not the same bits in two runs"
    for operator in {product.operator for product in products}:
        pair.expect_launches(operator, at_least=2)
    return {"products": len(products), "worst_error_over_baseline": round(worst, 3)}


def any_number_of_rows(pair: Pair) -> dict[str, Any]:
    """Odd multiples of 8 for n and k, from one row to thousands."""
    rows = ROWS if pair.on_gpu else ROWS[:6]
    products = [
        Product(operator=operator, rows=m, n=520, k=264, integers=i % 2 == 1, seed=i)
        for operator in KERNELS
        for i, m in enumerate(rows)
    ]
    return _run(pair, products)


def layouts_and_dtypes(pair: Pair) -> dict[str, Any]:
    """Transposed and sliced operands, fp16, bias, average, rows in segments."""
    products = [
        Product(operator=op, rows=384, n=776, k=328, layout=layout, dtype=dtype, bias=bias, sliced=sliced, seed=9)
        for op in KERNELS
        for layout in ("nk", "kn")
        for dtype in (torch.bfloat16, torch.float16)
        for bias, sliced in ((False, True), (True, False))
    ]
    products += [Product(operator=op, rows=129, n=264, k=72, average=True, seed=3) for op in KERNELS]
    products += [Product(operator="gemm_reduce_scatter", rows=3 * 200, n=264, k=136, outer=3, seed=4)]
    return _run(pair, products)


def model_sizes(pair: Pair) -> dict[str, Any]:
    """The shapes that are benchmarked, each right."""
    sizes = ((2048, 8192, 1024), (8192, 8192, 1024), (4096, 8192, 3584), (4096, 4096, 7168), (1024, 28672, 512))
    products = [
        Product(operator=op, rows=m // (2 if op == "gemm_reduce_scatter" else 1), n=n, k=k, seed=i)
        for op in KERNELS
        for i, (m, n, k) in enumerate(sizes)
    ]
    return _run(pair, products)


def several_products_in_one_sum(pair: Pair) -> dict[str, Any]:
    """x0 @ w0 + x1 @ w1 + x2 @ w2, of different inner sizes."""
    inner = (64, 200, 136)
    xs = [[pair.draw(300, k, seed=i, rank=r) for i, k in enumerate(inner)] for r in range(pair.world_size)]
    ws = [[pair.draw(520, k, seed=9 + i, rank=r).t() for i, k in enumerate(inner)] for r in range(pair.world_size)]
    out = torch.ops.mkcompile.gemm_all_reduce(xs[pair.rank], ws[pair.rank], None, "sum", 2, pair.group, "")
    terms = [x.float() @ w.float() for r in range(pair.world_size) for x, w in zip(xs[r], ws[r], strict=True)]
    truth = torch.stack(terms).sum(0)
    relative = ((out.float() - truth).norm() / truth.norm()).item()
    assert relative < 4e-3, relative
    pair.same_on_all_ranks(out, "sum of products")
    pair.expect_launches("gemm_all_reduce")
    return {"relative_error": relative}


def workspace_grows(pair: Pair) -> dict[str, Any]:
    """Small, large, small, larger: each right, and old memory is given back."""
    held = []
    sizes = ((64, 512, 128), (8192, 4096, 1024), (64, 512, 128), (8192, 8192, 2048), (128, 1024, 128))
    for i, (rows, n, k) in enumerate(sizes):
        product = Product(operator="gemm_all_reduce", rows=rows, n=n, k=k, seed=i)
        product.check(pair, product.call(pair, *product.inputs(pair, pair.rank)))
        held.append(pair.launcher.held_bytes() >> 20)
    pair.expect_launches("gemm_all_reduce", at_least=5)
    return {"held_mib": held}


def misaligned_operand_is_copied(pair: Pair) -> dict[str, Any]:
    """On one rank only: the other must not wait for a launch that does not come."""
    product = Product(operator="gemm_reduce_scatter", rows=192, n=264, k=136, integers=True, seed=5)
    x, w, bias = product.inputs(pair, pair.rank)
    if pair.rank == 1:
        shifted = torch.empty(x.numel() + 4, dtype=x.dtype, device=x.device)[4:].view_as(x)
        x = shifted.copy_(x)
        assert x.data_ptr() % 16 != 0
    for _ in range(3):
        product.check(pair, product.call(pair, x, w, bias))
    pair.expect_launches("gemm_reduce_scatter", at_least=3)
    return {}


def host_overhead(pair: Pair) -> dict[str, Any]:
    """Host time of a call: enqueueing alone, in batches that the launch queue holds; and of what it is made of."""
    times_us: dict[str, float] = {}
    parts_us: dict[str, dict[str, float]] = {}
    for operator in KERNELS:
        product = Product(operator=operator, rows=64, n=64, k=64)
        x, w, _ = product.inputs(pair, pair.rank)
        name = pair.group
        if operator == "gemm_all_reduce":
            arguments: tuple[Any, ...] = ([x], [w], None, "sum", 2, name, "key")
        else:
            arguments = ([x], [w], None, [128, 64], 0, "sum", 2, name, "key")
        overload = getattr(torch.ops.mkcompile, operator).default
        times_us[operator] = _best_us(pair, lambda: overload(*arguments))  # noqa: B023 (called in this round)
        if pair.on_gpu:
            parts_us[operator] = _parts_us(pair, operator, arguments)
    return {"host_us": times_us, "parts_us": parts_us}


def _best_us(pair: Pair, run: Callable[[], object], calls: int = 100) -> float:
    best = float("inf")
    for _ in range(20):
        pair.meet()
        started = time.perf_counter()
        for _ in range(calls):
            run()
        best = min(best, (time.perf_counter() - started) / calls)
    return round(best * 1e6, 2)


def _parts_us(pair: Pair, operator: str, arguments: tuple[Any, ...]) -> dict[str, float]:
    """The short way without torch's dispatcher, and what that asks of torch and the driver."""
    call_type = call_types()[operator]
    short = pair.launcher.shortcut(call_type)
    assert short is not None
    operation = pair.launcher.operation(operator)
    overload = getattr(torch.ops.mkcompile, operator).default
    out = overload(*arguments)  # kept, for the launch that is repeated
    launch = next(one for addresses, one in operation.launches.items() if addresses[-1] == out.data_ptr())
    chain, stream = operation.device.chain, operation.device.host.current_stream()
    return {
        "in_batches_of_10": _best_us(pair, lambda: overload(*arguments), calls=10),
        "without_dispatcher": _best_us(pair, lambda: short(*arguments)),
        "launch": _best_us(pair, lambda: launch.run(stream)),
        "event": _best_us(pair, lambda: chain.leave(stream, 0)),
        "capture": _best_us(pair, lambda: chain.enter(stream)),
        "allocation": _best_us(pair, operation.allocate),
    }


CASES = {
    "rows": any_number_of_rows,
    "layouts": layouts_and_dtypes,
    "sums": several_products_in_one_sum,
    "misaligned": misaligned_operand_is_copied,
    "growth": workspace_grows,
    "sizes": model_sizes,
    "overhead": host_overhead,
}
