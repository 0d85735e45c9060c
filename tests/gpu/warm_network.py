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


def tested_configs() -> list[KernelConfig]:
    """All operators, both shapes of groups, in the tiles of the tests; and those of compiled models."""
    forms = [*_FORMS, *({"block_m": 128, "block_n": columns, "weight_layout": "kn"} for columns in (128, 192, 256))]
    return [
        KernelConfig(operator=operator, broadcast=broadcast, network=network, **form)  # type: ignore[arg-type]
        for operator, broadcast in _OPERATORS
        for network in ("flat", "hierarchical")
        for form in forms
    ]


if __name__ == "__main__":
    for _ in warm_up(tested_configs(), os.cpu_count() or 1):
        pass
    mover_cubin()
