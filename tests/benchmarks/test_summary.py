"""The README's tables are those of the result files."""

from __future__ import annotations

from pathlib import Path

from benchmarks import summary
from benchmarks.models import results, table

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


def test_the_readme_has_the_operators_as_they_were_measured() -> None:
    text = README.read_text(encoding="utf-8")
    assert summary.replaced(text) == text, "run python -m benchmarks.summary --write"


def test_the_readme_has_the_models_as_they_were_measured() -> None:
    text = README.read_text(encoding="utf-8")
    rows = results.read(ROOT / "benchmarks" / "results" / "2xh200" / "models.jsonl")
    assert table.replaced(text, table.summary_table(rows)) == text, "run python -m benchmarks.models.table"


def test_a_line_has_means_over_the_shapes_and_says_where_ours_is_ahead() -> None:
    line = summary.Line(title="both", file="", op="gemm_all_reduce")

    def shape(ours_ms: float) -> dict[str, dict[str, float]]:
        return {
            "cublas": {"ms": 1.0}, "cublas_nccl": {"ms": 2.0}, "mkcompile": {"ms": ours_ms, "ceiling_ms": 1.0},
        }  # fmt: skip

    found = {("sustained", "gemm_all_reduce", m, 1, 1): shape(ms) for m, ms in ((1, 1.0), (2, 4.0))}
    assert summary.line_of(line, found) == "| both | 2 | 2.00 | 2.00 | 0.50 to 2.00 | 1 |"
