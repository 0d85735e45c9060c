"""Which lines of the results stand in the README's pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import overview, style
from benchmarks.report import geometric_mean, read

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ROWS = {
    "cublas": {"ms": 1.0},
    "cublas_beside_copies": {"ms": 1.1},
    "cublas_nccl": {"ms": 2.0},
    "mkcompile_push": {"ms": 1.5},
}


def test_the_gemm_alone_and_our_own_lines_are_no_contenders() -> None:
    assert overview.best_other_ms(ROWS) == 2.0


def test_of_a_launch_that_was_timed_twice_the_slower_time_counts() -> None:
    rows = {**ROWS, "mkcompile": {"ms": 1.4, "variant": "push 128x128"}}
    assert overview.ours_ms(rows, "mkcompile") == 1.5  # type: ignore[arg-type]


@pytest.mark.parametrize(("op", "file", "name"), overview.PANELS)
def test_every_panel_has_rows_and_every_line_a_name(op: str, file: str, name: str) -> None:
    found = {key: rows for key, rows in read(RESULTS / "2xh200" / file).items() if key[:2] == ("sustained", op)}
    ratios = [overview.ours_ms(rows, name) / rows["cublas"]["ceiling_ms"] for rows in found.values()]
    assert 0.9 < geometric_mean(ratios) < 1.4
    assert {one for rows in found.values() for one in rows} <= set(style.LABELS)
