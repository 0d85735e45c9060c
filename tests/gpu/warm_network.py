"""`python -m tests.gpu.warm_network`: compile what test_network launches, in parallel and not one by one."""

from __future__ import annotations

import os

from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.warmup import warm_up


def tested_configs() -> list[KernelConfig]:
    """Both operators, both shapes of groups, in the tiles of the tests."""
    forms: tuple[dict[str, object], ...] = (
        {"block_m": 128, "block_n": 256},
        {"block_m": 128, "block_n": 128},
        {"block_m": 64, "block_n": 64},
        {"block_m": 128, "block_n": 128, "has_bias": True, "weight_layout": "kn"},
        {"block_m": 64, "block_n": 64, "dtype": "float16"},
    )
    return [
        KernelConfig(operator=operator, broadcast=broadcast, network=network, **form)  # type: ignore[arg-type]
        for operator, broadcast in (("gemm_reduce_scatter", "none"), ("gemm_all_reduce", "staged"))
        for network in ("flat", "hierarchical")
        for form in forms
    ]


if __name__ == "__main__":
    for _ in warm_up(tested_configs(), os.cpu_count() or 1):
        pass
