"""When a compiled model's numbers are right: no further from the truth than twice as far as eager's, plus a rounding.

Compiled and eager sum in different orders and round at different places, so they differ in the last bits; comparing
them with each other would need a tolerance that says nothing about either.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.models.harness import Error, Result

FACTOR = 2.0


def too_far(error: Error, dtype: torch.dtype) -> str | None:
    """What is wrong with the tensor, or None. `dtype` is what the model computes in."""
    rounding = torch.finfo(dtype).eps
    if not error.finite:
        return f"{error.name}: not finite"
    for kind, compiled, eager, scale in (
        ("worst element", error.compiled_worst, error.eager_worst, error.scale_worst),
        ("rms", error.compiled_rms, error.eager_rms, error.scale_rms),
    ):
        allowed = FACTOR * eager + rounding * scale
        if not compiled <= allowed:
            return f"{error.name}: {kind} error {compiled:.2e}, allowed {allowed:.2e} (eager {eager:.2e})"
    return None


def complaints(results: Sequence[Result], dtype: torch.dtype) -> list[str]:
    """Everything that is wrong with the numbers of one cell, over all ranks."""
    return [
        f"rank {rank}, {found}"
        for rank, result in enumerate(results)
        for error in result.errors
        if (found := too_far(error, dtype)) is not None
    ]
