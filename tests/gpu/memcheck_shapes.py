"""Run by test_memcheck under the tool: a few launches of odd sizes, every operator, each checked for its result."""

from __future__ import annotations

import sys

from mkcompile.runtime.gather_launch import GatherSize
from mkcompile.runtime.gather_schedule import push_choice
from mkcompile.runtime.kernel_config import KernelConfig
from tests.gpu.gather_calls import Call
from tests.gpu.ranks import RankGroup
from tests.gpu.test_reductions import OPERATORS, check, config_of

SIZES = ((2, 8, 8), (258, 136, 72), (130, 264, 200))


def main() -> None:
    """Two ranks on one GPU. Waits may be long: the tool slows kernels a hundredfold."""
    group = RankGroup((0, 0), arena_bytes=16 << 20, timeout_s=60.0)
    launches = 0
    for operator, broadcast in OPERATORS:
        for trace in (False, True):
            for m, n, k in SIZES:
                config = config_of(operator, broadcast, (64, 64), trace=trace)
                check(group, config, m, n, k, epochs=1, integers=False)
                launches += 1
    for rows, n, k in SIZES:
        size = GatherSize(segment_rows=rows, k=k, n=(n, 2 * n), world=2)
        config = KernelConfig(operator="all_gather_gemm", block_m=64, block_n=64, has_bias=True)
        call = Call.make(group, push_choice(config, size, group.max_grid(), returned=True), size, returned=True)
        group.synchronize()
        call.run(group)
        group.synchronize()
        group.check()
        call.check(False, "all-gather")
        launches += 1
    sys.stdout.write(f"{launches} launches checked\n")


if __name__ == "__main__":
    main()
