"""Run by test_memcheck under the tool: a few launches of odd sizes, every operator, each checked for its result."""

from __future__ import annotations

import sys

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
    sys.stdout.write(f"{launches} launches checked\n")


if __name__ == "__main__":
    main()
