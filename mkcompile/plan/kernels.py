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

#: All-gathers whose transfers, which are launched first, wait for a kernel that is launched after them.
_FED_BY_COPY_ENGINE = frozenset({"all_gather_gemm/copy_engine", "all_gather_gemm/library"})


def launchable(launches_block: bool) -> frozenset[str]:
    """The kernels that can run; where a launch waits for the end of the one before, none that the copy engine feeds."""
    return AVAILABLE - _FED_BY_COPY_ENGINE if launches_block else AVAILABLE


#: What is planned where nobody says otherwise.
EXISTING = Policy(available=AVAILABLE)
