"""`python -m tests.gpu.warm_streams`: compile what test_few_rows launches, in parallel and not one by one."""

from __future__ import annotations

import os

from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.stream_schedule import stream_configs
from mkcompile.runtime.warmup import warm_up


def tested_configs() -> list[KernelConfig]:
    """Every tile and split, in the layouts, dtypes and biases of the tests."""
    bases = [
        KernelConfig(operator=operator, weight_layout=layout, dtype=dtype, has_bias=layout == "kn")  # type: ignore[arg-type]
        for operator, layout, dtype in (
            *(("gemm", layout, dtype) for layout in ("nk", "kn") for dtype in ("bfloat16", "float16")),
            ("gemm_reduce_scatter", "nk", "bfloat16"), ("gemm_reduce_scatter", "kn", "float16"),
        )
    ]  # fmt: skip
    found = [config for base in bases for config in stream_configs(base)]
    for layout, dtype in (("nk", "bfloat16"), ("kn", "float16")):
        base = KernelConfig(
            operator="gemm_all_reduce",
            broadcast="staged",
            weight_layout=layout,
            dtype=dtype,
            has_bias=layout == "kn",  # type: ignore[arg-type]
        )
        found += stream_configs(base)
    return found


if __name__ == "__main__":
    for _ in warm_up(tested_configs(), os.cpu_count() or 1):
        pass
