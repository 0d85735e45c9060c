"""Which kernels exist: what a plan for a real machine may choose from."""

from __future__ import annotations

from mkcompile.plan.decide import Policy

#: As `operator/variant`, for `Policy.available`. Results that stay in their graph are stored `direct`.
AVAILABLE = frozenset(
    {
        "gemm_reduce_scatter/push", "gemm_reduce_scatter/stream", "gemm_all_reduce/staged", "gemm_all_reduce/stream",
        "all_gather_gemm/push", "all_gather_gemm/copy_engine", "all_gather_gemm/library",
        "all_gather_gemm/remote_read", "all_gather_gemm/pull", "all_gather_gemm/stream",
    }
)  # fmt: skip

#: What is planned where nobody says otherwise.
EXISTING = Policy(available=AVAILABLE)
