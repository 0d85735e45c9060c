"""`python -m benchmarks.jit_time --out FILE`: what a cold compile of each main kernel costs.

One process a kernel, which has imported the package but compiled nothing, and no cache: the first compile, in which the
compiler's library is loaded too, then further ones of the same source. One JSON line a kernel. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from multiprocessing import get_context
from pathlib import Path

from mkcompile.runtime import nvrtc, sources
from mkcompile.runtime.kernel import OPTIONS, translation_unit
from mkcompile.runtime.kernel_config import KernelConfig

#: One of each kind, in the largest tile, the form for few rows, and the least and most over nodes.
KERNELS = (
    KernelConfig(operator="gemm"),
    KernelConfig(operator="gemm_reduce_scatter"),
    KernelConfig(operator="gemm_all_reduce", broadcast="direct"),
    KernelConfig(operator="gemm_all_reduce", broadcast="staged"),
    KernelConfig(operator="gemm_all_reduce", broadcast="staged", dtype="float16", has_bias=True),
    KernelConfig(operator="all_gather_gemm"),
    KernelConfig(operator="all_gather_gemm", returns=True),
    KernelConfig(operator="gemm_reduce_scatter", streams=True, block_m=128, block_n=128, hands_over=True),
    KernelConfig(operator="gemm_all_reduce", streams=True, block_m=128, block_n=128, hands_over=True),
    KernelConfig(operator="gemm_reduce_scatter", network="flat"),
    KernelConfig(operator="gemm_all_reduce", broadcast="staged", network="hierarchical", has_bias=True),
)
_AGAIN = 3


def times_of(config: KernelConfig) -> dict[str, object]:
    """Units: seconds; `_cpu_s` of all threads of the process."""
    source, headers = translation_unit(config), sources.headers()
    walls: list[float] = []
    busy: list[float] = []
    for _ in range(1 + _AGAIN):
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        nvrtc.compile_cubin(config.name, source, headers, OPTIONS)
        walls.append(round(time.perf_counter() - wall_s, 3))
        busy.append(round(time.process_time() - cpu_s, 3))
    return {
        "kernel": config.name, "first_s": walls[0], "first_cpu_s": busy[0],
        "again_s": min(walls[1:]), "again_cpu_s": min(busy[1:]),
    }  # fmt: skip


def main(arguments: list[str]) -> None:
    """One kernel after the other, unless there are cores to spare."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jit_time", description=__doc__)
    parser.add_argument("--commit", default="unknown", help="written into every line")
    parser.add_argument("--jobs", type=int, default=1, help="kernels at a time; each wants a core of its own")
    parser.add_argument("--out", type=Path, help="JSON lines; default: only printed")
    options = parser.parse_args(arguments)
    text = ""
    with get_context("spawn").Pool(options.jobs, maxtasksperchild=1) as pool:
        for times in pool.imap(times_of, KERNELS, chunksize=1):
            text += json.dumps({**times, "nvrtc": nvrtc.version(), "commit": options.commit}) + "\n"
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main(sys.argv[1:])
