"""`python -m tests.gpu.warm_network`: compile what the tests of several nodes launch, in parallel."""

from __future__ import annotations

import os

from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.network_gather import mover_cubin
from mkcompile.runtime.warmup import warm_up

_FORMS: tuple[dict[str, object], ...] = (
    {"block_m": 128, "block_n": 256},
    {"block_m": 128, "block_n": 128},
    {"block_m": 64, "block_n": 64},
    {"block_m": 128, "block_n": 128, "has_bias": True, "weight_layout": "kn"},
    {"block_m": 64, "block_n": 64, "dtype": "float16"},
)
_OPERATORS = (("gemm_reduce_scatter", "none"), ("gemm_all_reduce", "staged"), ("all_gather_gemm", "none"))
#: What the planner takes for two processes over a network that is slower than the products: `network_cases.py`.
_SMALLEST: tuple[dict[str, object], ...] = ({}, {"has_bias": True}, {"weight_layout": "kn"})


def tested_configs() -> list[KernelConfig]:
    """All operators, both shapes of groups, in the tiles of the tests; and those of compiled models."""
    processes = [
        KernelConfig(operator=operator, broadcast=broadcast, network="flat", block_m=64, block_n=columns, **form)  # type: ignore[arg-type]
        for operator, broadcast in _OPERATORS
        for columns in (64 if operator == "all_gather_gemm" else 32,)
        for form in _SMALLEST
    ]
    forms = [*_FORMS, *({"block_m": 128, "block_n": columns, "weight_layout": "kn"} for columns in (128, 192, 256))]
    ranks = [
        KernelConfig(operator=operator, broadcast=broadcast, network=network, **form)  # type: ignore[arg-type]
        for operator, broadcast in _OPERATORS
        for network in ("flat", "hierarchical")
        for form in forms
    ]
    return list(dict.fromkeys((*processes, *ranks)))


if __name__ == "__main__":
    for _ in warm_up(tested_configs(), os.cpu_count() or 1):
        pass
    mover_cubin()
