"""How long a GEMM takes: whole waves of tiles at the tensor cores' rate, or the memory's floor, whichever is longer.

All functions work in microseconds and never fall when m, n or k grows.
Source: `benchmarks/results/2xh200/ops-baseline.json`, `small-baseline.json`; `docs/planner.md` derives the form.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, exp

from mkcompile.plan.constants import Constants
from mkcompile.plan.topology import Gpu

SPLITS = (2, 4)
STREAM_COLUMNS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """Sizes of one product: [m, k] x [k, n], `dtype_bytes` an element."""

    m: int
    n: int
    k: int
    dtype_bytes: int = 2

    @property
    def flops(self) -> int:
        """Two for a multiply-add."""
        return 2 * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Read and written once."""
        return self.dtype_bytes * (self.m * self.k + self.k * self.n + self.m * self.n)


def dtype_rate(dtype_bytes: int) -> float:
    """Tensor-core rate relative to bf16: half of it for fp32 (as tf32), twice for fp8."""
    return 2.0 / dtype_bytes


def tile_us(rows: int, columns: int, gemm: Gemm, gpu: Gpu, constants: Constants) -> float:
    """Time of one tile of the output on one SM."""
    rate = gpu.peak_tflops * 1e6 * constants.gemm_mma_fraction * dtype_rate(gemm.dtype_bytes) / gpu.num_sms
    return 2 * rows * columns * gemm.k / rate


def num_tiles(gemm: Gemm, rows: int, columns: int) -> int:
    """Tiles of the output."""
    return ceil(gemm.m / rows) * ceil(gemm.n / columns)


def throttled(busy_us: float, constants: Constants) -> float:
    """The chip is power-limited: the longer a launch keeps the tensor cores busy, the lower its clock."""
    return busy_us * (1 + constants.power_fraction * (1 - exp(-busy_us / constants.power_time_us)))


def stream_us(gemm: Gemm, gpu: Gpu, constants: Constants) -> float:
    """Memory's floor. Where the weight has fewer 64-column strips than there are SMs, not all of them stream it."""
    fill = min(1.0, gemm.n / STREAM_COLUMNS / gpu.num_sms)
    weight_bytes = gemm.dtype_bytes * gemm.k * gemm.n
    other_bytes = gemm.bytes - weight_bytes
    gbps = gpu.hbm_gbps * constants.hbm_fraction
    return (weight_bytes / float(fill**constants.hbm_fill_exponent) + other_bytes) / gbps * 1e-3


def cublas_us(gemm: Gemm, gpu: Gpu, constants: Constants) -> float:
    """cuBLAS: the best of its tile shapes and of split-K, plus a launch."""
    shapes = ((256, 1.0), (192, 1.0), (128, constants.gemm_128_wide), (64, constants.gemm_64_wide))
    busy = min(
        ceil(num_tiles(gemm, 128, columns) / gpu.num_sms) * tile_us(128, columns, gemm, gpu, constants) / efficiency
        for columns, efficiency in shapes
    )
    busy = min(busy, *(_split_k_us(gemm, split, gpu, constants) for split in SPLITS))
    return constants.gemm_launch_us + max(throttled(busy, constants), stream_us(gemm, gpu, constants))


def _split_k_us(gemm: Gemm, split: int, gpu: Gpu, constants: Constants) -> float:
    waves = ceil(num_tiles(gemm, 128, 128) * split / gpu.num_sms)
    product = waves * tile_us(128, 128, gemm, gpu, constants) / split / constants.gemm_128_wide
    partials_bytes = 2 * 4 * split * gemm.m * gemm.n
    return product + partials_bytes / constants.gemm_split_k_gbps * 1e-3


def elementwise_us(moved_bytes: float, gpu: Gpu, constants: Constants) -> float:
    """A memory-bound kernel that reads and writes so many bytes in all."""
    if moved_bytes <= 0:
        return 0.0
    return constants.gemm_launch_us + moved_bytes / (gpu.hbm_gbps * constants.hbm_fraction) * 1e-3
