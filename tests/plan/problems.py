"""Problems for the planner's tests."""

from __future__ import annotations

from typing import Any

from mkcompile.ops.problem import Problem

OPERATORS = ("gemm_reduce_scatter", "gemm_all_reduce", "all_gather_gemm", "ffn")


def problem(operator: str, m: int, n: int, k: int, world_size: int = 2, **more: Any) -> Problem:
    """A bf16 problem; an FFN gets a gated hidden layer of twice its output features unless told otherwise."""
    if operator == "ffn":
        more = {"hidden": 2 * n, "gated": True, "activation": "silu", **more}
    return Problem(operator=operator, m=m, n=n, k=k, world_size=world_size, dtype="bfloat16", dtype_bytes=2, **more)
