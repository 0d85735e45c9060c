"""Sizes that the benchmarks run: projections of language models under tensor parallelism.

Shapes: `m` rows in all, `n` and `k` local columns and summed dimension; the weight is [n, k] in memory.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """One GEMM of one rank."""

    m: int
    n: int
    k: int

    @property
    def flop(self) -> int:
        """Operations of one rank."""
        return 2 * self.m * self.n * self.k


#: Down projections, whose results are reduced.
REDUCED = tuple(
    Shape(*sizes)
    for sizes in (
        (2048, 8192, 1024), (8192, 8192, 1024), (2048, 8192, 3584), (4096, 8192, 3584), (8192, 8192, 3584),
        (16384, 8192, 3584), (8192, 8192, 14336), (4096, 4096, 7168), (8192, 8192, 4096), (16384, 16384, 2048),
        (32768, 32768, 4096),
    )
)  # fmt: skip
#: Up projections, whose inputs are gathered.
GATHERED = tuple(
    Shape(*sizes)
    for sizes in (
        (2048, 1280, 8192), (8192, 1280, 8192), (2048, 7168, 8192), (4096, 7168, 8192), (8192, 7168, 8192),
        (16384, 7168, 8192), (8192, 28672, 8192), (4096, 4096, 16384), (16384, 4096, 16384),
    )
)  # fmt: skip
SHAPES = {
    "gemm": REDUCED + GATHERED,
    "gemm_reduce_scatter": REDUCED,
    "gemm_all_reduce": REDUCED,
    "all_gather_gemm": GATHERED,
}
