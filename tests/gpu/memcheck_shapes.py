"""Run by test_memcheck under the tool: a few launches of odd sizes, every operator and variant, each checked.

    python tests/gpu/memcheck_shapes.py PART

Parts: what blocks do by themselves; and what the copy engine and the host's proxies do beside them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from mkcompile.runtime.gather_launch import GatherSize
from mkcompile.runtime.gather_schedule import (
    GatherChoice,
    engine_choice,
    pull_choice,
    push_choice,
    read_choice,
    stream_choice,
)
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.stream_schedule import StreamForm
from tests.gpu import network_gather_calls as over_nodes
from tests.gpu.gather_calls import Call, Engines
from tests.gpu.network_ranks import node_group
from tests.gpu.ranks import RankGroup
from tests.gpu.test_adding import check as check_added
from tests.gpu.test_few_rows import check_gemm, stream_config
from tests.gpu.test_network import config_of as network_config
from tests.gpu.test_reductions import OPERATORS, check, config_of
from tests.gpu.test_tile_gemm import check as check_tiled

SIZES = ((2, 8, 8), (258, 136, 72), (130, 264, 200))
#: Streaming kernels: alone, of two blocks that share a tile, of groups in turns, and of partials that are handed over.
FEW_ROWS = (
    {"tile": (64, 64)}, {"tile": (64, 64), "split": 2}, {"tile": (64, 128), "ping_pong": True},
    {"tile": (64, 64), "hands_over": True},
)  # fmt: skip
_GATHER = KernelConfig(operator="all_gather_gemm", block_m=64, block_n=64)
#: Waits may be long: the tool slows kernels a hundredfold. Those for transfers: it may let none run beside a kernel.
_TIMEOUT_S, _TRANSFER_TIMEOUT_S = 60.0, 15.0


def virtual_ranks(timeout_s: float = _TIMEOUT_S) -> RankGroup:
    """Two on one GPU."""
    return RankGroup((0, 0), arena_bytes=16 << 20, timeout_s=timeout_s)


def of_one_rank() -> Iterable[str]:
    """Plain products, tiled and streamed."""
    for m, n, k in SIZES:
        check_tiled(KernelConfig(block_m=64, block_n=64), m, n, k)
        yield "gemm"
    for split in (1, 2):
        check_gemm(stream_config(split=split), 65, 136, 200)
        yield f"gemm of few rows, {split}"


def reductions() -> Iterable[str]:
    """Tiled kernels, traced and not, that store and that add; and those for few rows."""
    group = virtual_ranks()
    for operator, broadcast in OPERATORS:
        for trace in (False, True):
            for m, n, k in SIZES:
                config = config_of(operator, broadcast, (64, 64), trace=trace)
                check(group, config, m, n, k, epochs=1, integers=False)
                yield config.name
    for operator, broadcast in (("gemm_reduce_scatter", "none"), ("gemm_all_reduce", "staged")):
        config = config_of(operator, broadcast, (64, 64))
        check_added(group, config, 130, 136, 200, epochs=1)
        yield f"{config.name}, added"
    for operator in ("gemm_reduce_scatter", "gemm_all_reduce"):
        for form in FEW_ROWS:
            config = stream_config(operator, **form)
            check(group, config, 130, 136, 200, epochs=1, integers=False)
            yield config.name


def _gathered(group: RankGroup, choice: GatherChoice, size: GatherSize, returned: bool, engines: Engines | None) -> str:
    call = Call.make(group, choice, size, returned=returned, engines=engines)
    group.synchronize()
    call.run(group)
    group.synchronize()
    group.check()
    call.check(False, choice.variant)
    return f"{choice.variant} {choice.config.name}"


def gathers() -> Iterable[str]:
    """By blocks: pushed, fetched, read in place and streamed."""
    group = virtual_ranks()
    grid = group.max_grid()
    for rows, n, k in SIZES:
        size = GatherSize(segment_rows=rows, k=k, n=(n, 2 * n), world=2)
        biased = KernelConfig(operator="all_gather_gemm", block_m=64, block_n=64, has_bias=True)
        yield _gathered(group, push_choice(biased, size, grid, returned=True), size, True, None)
        yield _gathered(group, pull_choice(_GATHER, size, grid), size, False, None)
        yield _gathered(group, read_choice(_GATHER, size, grid), size, False, None)
    size = GatherSize(segment_rows=65, k=200, n=(136, 72), world=2)
    for split in (1, 2):
        yield _gathered(group, stream_choice(_GATHER, size, grid, StreamForm((64, 64), split)), size, False, None)


def gathers_by_engine() -> Iterable[str]:
    """Rows that the copy engine sends, between the gate's and the audit's kernels."""
    group = virtual_ranks(_TRANSFER_TIMEOUT_S)
    engines = Engines(group, area_bytes=4 << 20)
    for rows, n, k in SIZES:
        size = GatherSize(segment_rows=rows, k=k, n=(n,), world=2)
        yield _gathered(group, engine_choice(_GATHER, size, group.max_grid()), size, False, engines)


def nodes() -> Iterable[str]:
    """Two nodes of one rank, joined by proxies."""
    with node_group((0, 0), 2, timeout_s=_TRANSFER_TIMEOUT_S) as group:
        for operator, broadcast in (("gemm_reduce_scatter", "none"), ("gemm_all_reduce", "staged")):
            config = network_config(group, operator, broadcast, (64, 64))
            check(group, config, 130, 136, 200, epochs=1, integers=False)
            yield config.name
        config = over_nodes.config_of(group, (128, 128))
        size = GatherSize(segment_rows=65, k=200, n=(136,), world=2)
        call = over_nodes.make_call(group, over_nodes.Movers.of(group), config, size)
        group.synchronize()
        call.run(group)
        group.synchronize()
        group.check()
        call.check(False, config.name)
        yield config.name


PARTS: dict[str, tuple[Callable[[], Iterable[str]], ...]] = {
    "blocks": (of_one_rank, reductions, gathers), "transfers": (gathers_by_engine, nodes),
}  # fmt: skip


def main(parts: Iterable[str]) -> None:
    """Each launch is named when it has been checked, so that it can be seen where the tool stopped."""
    launches = 0
    for run in (run for part in parts for run in PARTS[part]):
        for name in run():
            launches += 1
            sys.stdout.write(f"{launches} {name}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{launches} launches checked\n")


if __name__ == "__main__":
    main(sys.argv[1:] or PARTS)
