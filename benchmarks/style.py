"""What the plots share: operators and contenders by the names that readers know, each contender in one colour."""

from __future__ import annotations

TITLES = {
    "gemm": "GEMM",
    "gemm_reduce_scatter": "GEMM + reduce-scatter",
    "gemm_all_reduce": "GEMM + all-reduce",
    "all_gather_gemm": "all-gather + GEMM",
}
#: Products whose results need no other rank: ceilings, not contenders.
ALONE = ("cublas", "cublas_beside_copies")
LABELS = {
    "mkcompile": "mkcompile", "mkcompile_direct": "mkcompile, symmetric output",
    "mkcompile_staged": "mkcompile, ordinary output", "mkcompile_push": "by pushes", "mkcompile_pull": "by fetches",
    "mkcompile_copy_engine": "by the copy engine", "mkcompile_library": "by cuBLAS slices",
    "eager": "eager", "inductor": "Inductor", "async_tp": "async TP",
    "cublas": "cuBLAS", "cublas_beside_copies": "cuBLAS beside copies", "cublas_nccl": "cuBLAS + NCCL",
    "cublas_two_shot": "cuBLAS + two-shot", "cublas_one_shot": "cuBLAS + one-shot",
}  # fmt: skip
OURS, GEMM, COLLECTIVE = "#2563eb", "#64748b", "#f59e0b"
_COLOURS = {
    "mkcompile": OURS, "mkcompile_direct": "#93c5fd", "mkcompile_staged": OURS,
    "mkcompile_push": "#60a5fa", "mkcompile_pull": "#93c5fd", "mkcompile_copy_engine": "#bfdbfe",
    "mkcompile_library": "#dbeafe",
    "eager": "#cbd5e1", "inductor": GEMM, "cublas": GEMM, "cublas_nccl": COLLECTIVE, "async_tp": "#16a34a",
    "cublas_two_shot": "#c2410c", "cublas_one_shot": "#fcd34d",
}  # fmt: skip
_NUMBERS = {1: "one", 2: "two", 4: "four", 8: "eight"}


def label(contender: str) -> str:
    """For a legend."""
    return LABELS.get(contender, contender)


def colour(contender: str) -> str:
    """Ours are blue."""
    return _COLOURS.get(contender, "#a8a29e")


def machine(world: int) -> str:
    """`two H200`."""
    return f"{_NUMBERS.get(world, world)} H200"
