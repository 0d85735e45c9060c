"""`python -m tests.gpu.warm_families`: compile in parallel what two processes launch and `mkcompile warmup` leaves out.

That is: gathers that fetch and that stream, some in float16, and what is traced. Else a family compiles it one by one,
within its time limit.
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import product

from mkcompile.runtime.gather_schedule import STREAM_GATHERS
from mkcompile.runtime.kernel_config import GATHER_TILES, KernelConfig
from mkcompile.runtime.stream_schedule import stream_config
from mkcompile.runtime.warmup import warm_up

_LAYOUTS = ("nk", "kn")
#: Of gathers whose rows are a result, too, in float16.
_RETURNED = ((64, 64), (128, 192))
_GATHER = KernelConfig(operator="all_gather_gemm")
_SCATTER, _REDUCE = (
    KernelConfig(operator="gemm_reduce_scatter"), KernelConfig(operator="gemm_all_reduce", broadcast="staged")
)  # fmt: skip


def gathers() -> list[KernelConfig]:
    """Of `gather_cases.py`, and of the benchmarks of gathers."""
    found = [stream_config(_GATHER, form.tile, form.split) for form in STREAM_GATHERS]
    # of captures without warm-up
    found.append(stream_config(replace(_GATHER, dtype="float16", weight_layout="kn"), (64, 64), 1))
    found.append(replace(_GATHER, pulls=True, has_bias=True, weight_layout="kn").with_tile(64, 64))
    for tile, layout in product(GATHER_TILES, _LAYOUTS):
        base = replace(_GATHER, weight_layout=layout).with_tile(*tile)  # type: ignore[arg-type]
        half = replace(base, dtype="float16")
        found += [replace(base, pulls=True), replace(half, pulls=True), half, replace(half, has_bias=True)]
        if tile in _RETURNED:
            found.append(replace(half, has_bias=True, returns=True))
    return found


def half_precision() -> list[KernelConfig]:
    """The reductions of `operator_cases.py` and `graph_cases.py` in float16."""
    few = [
        stream_config(replace(base, dtype="float16"), tile, 1)
        for base, tile in ((_REDUCE, (64, 64)), (_SCATTER, (64, 64)), (_SCATTER, (64, 128)), (_SCATTER, (128, 64)))
    ]
    found = [
        form for one in few for form in (one, replace(one, has_bias=True), replace(one, weight_layout="kn"))
    ]  # fmt: skip
    large = [(_REDUCE, (128, 64)), (_REDUCE, (128, 128)), (_SCATTER, (128, 256))]
    return [*found, *(replace(base, dtype="float16").with_tile(*tile) for base, tile in large)]


def traced() -> list[KernelConfig]:
    """Of `trace_cases.py`, and of the `trace` command at the shapes of the documentation."""
    few = stream_config(_REDUCE, (128, 64), 1, hands_over=True)
    tiles = ((128, 128), (128, 256))
    large = [base.with_tile(*tile) for base in (_GATHER, _SCATTER, _REDUCE) for tile in tiles]
    return [replace(one, trace=True) for one in (few, *large, _GATHER.with_tile(128, 160))]


def tested_configs() -> list[KernelConfig]:
    """All of them."""
    return list(dict.fromkeys((*gathers(), *half_precision(), *traced())))


if __name__ == "__main__":
    for _ in warm_up(tested_configs(), os.cpu_count() or 1):
        pass
