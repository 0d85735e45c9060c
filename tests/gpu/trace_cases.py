"""Tracing on two GPUs: what it costs, and how well the clocks of two GPUs can be aligned."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mkcompile.ops.registry import set_launcher
from mkcompile.runtime.agree import Agreement
from mkcompile.runtime.dispatch import Dispatch
from mkcompile.runtime.launcher import Launcher
from mkcompile.runtime.trace.clocks import align
from mkcompile.runtime.trace.exposed import summary
from tests.gpu.pair import KERNELS, Pair, Product

ROWS, N, K = (2048, 8192), 8192, 3584
CALLS, ROUNDS = 20, 8


def _timed_ms(pair: Pair, product: Product, operands: tuple[Any, ...]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    pair.meet()
    product.call(pair, *operands)
    start.record()
    for _ in range(CALLS):
        product.call(pair, *operands)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / CALLS


def overhead(pair: Pair) -> dict[str, Any]:
    """Traced and untraced launches in turn: the traced ones are at most a tenth slower."""
    launchers = {"plain": Launcher(pair.platform, trace=False), "traced": Launcher(pair.platform, trace=True)}
    dispatches = {name: Dispatch(Agreement(), launcher) for name, launcher in launchers.items()}
    found: dict[str, Any] = {}
    for operator in KERNELS:
        for rows in ROWS:
            product = Product(operator=operator, rows=rows // (2 if operator == "gemm_reduce_scatter" else 1), n=N, k=K)
            operands = product.inputs(pair, pair.rank)
            times: dict[str, list[float]] = {name: [] for name in launchers}
            for _ in range(ROUNDS):
                for name, dispatch in dispatches.items():
                    set_launcher(dispatch)
                    times[name].append(_timed_ms(pair, product, operands))
            best = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
            found[f"{operator} {rows}"] = {name: round(ms, 4) for name, ms in best.items()}
            assert best["traced"] < 1.1 * best["plain"], found
    set_launcher(Dispatch(Agreement(), pair.launcher))
    return found


def clocks(pair: Pair) -> dict[str, Any]:
    """Many launches leave a narrow interval, and the interval of the first half overlaps that of the second.

    Ranks that share a GPU have one clock, and an interval as wide as the driver's turns.
    """
    launcher = Launcher(pair.platform, trace=True)
    set_launcher(Dispatch(Agreement(), launcher))
    product = Product(operator="gemm_all_reduce", rows=2048, n=4096, k=1024)  # few rows tell of no flags
    operands = product.inputs(pair, pair.rank)
    product.call(pair, *operands)
    halves, numbers = [], []
    for _ in range(2):
        pair.meet()
        launcher.clear_traces()
        for _ in range(10):
            product.call(pair, *operands)
        pair.meet()
        traces: list[Any] = [None] * pair.world_size
        dist.all_gather_object(traces, launcher.traces(pair.rank)[0])
        halves.append(align(traces)[1])
        numbers = [(one.rank, round(one.span_us, 1), round(one.exposed_us, 1)) for one in summary(traces)]
    set_launcher(Dispatch(Agreement(), pair.launcher))
    first, second = halves
    assert first.within_ns is not None and second.within_ns is not None, halves
    assert abs(first.offset_ns - second.offset_ns) <= first.within_ns + second.within_ns + 2000, halves
    if pair.shares_device:
        assert abs(first.offset_ns) <= first.within_ns + 2000, halves
    return {
        "offset_ns": [one.offset_ns for one in halves], "within_ns": [one.within_ns for one in halves],
        "rank_span_exposed_us": numbers,
    }  # fmt: skip


CASES = {"overhead": overhead, "clocks": clocks}
