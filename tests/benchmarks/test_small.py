"""Few rows: which variants are timed, and their pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import plot_small, small_contenders, small_variants
from benchmarks.small_contenders import OPERATORS, SHAPES, size_of
from mkcompile.runtime.stream_schedule import can_stream


@pytest.fixture(autouse=True)
def an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (small_contenders, small_variants):
        monkeypatch.setattr(module, "num_sms", lambda: 132)
        monkeypatch.setattr(module, "max_grid", lambda: 128)


@pytest.mark.parametrize("op", OPERATORS)
def test_variants_have_names_of_their_own_and_can_be_launched(op: str) -> None:
    for shape in SHAPES[::3]:
        swept = small_variants.swept_variants(op, shape, 2)  # type: ignore[arg-type]
        paced = small_variants.paced_variants(op, shape, 2)  # type: ignore[arg-type]
        for found in (swept, paced):
            names = [name for name, _ in found]
            assert len(set(names)) == len(names)
        assert all(variant.config.reduces for _, variant in paced)
        for _, variant in swept:
            size = size_of(op, shape, 2)  # type: ignore[arg-type]
            assert not variant.config.streams or can_stream(variant.config, size)


@pytest.mark.parametrize("op", OPERATORS)
def test_what_the_planner_takes_is_among_what_is_swept(op: str) -> None:
    """At 128 rows and more, where the sweep has the other kernels, too."""
    for shape in SHAPES:
        if shape.m >= 128:
            swept = {variant.text for _, variant in small_variants.swept_variants(op, shape, 2)}  # type: ignore[arg-type]
            chosen = [variant for _, variant in small_variants.chosen_variants(op, shape, 2)]  # type: ignore[arg-type]
            streaming = {variant.text for variant in chosen if variant.config.streams}
            assert streaming <= swept, (shape, streaming)


def test_a_picture_for_each_operator(tmp_path: Path) -> None:
    def row(op: str, contender: str, m: int, k: int) -> dict[str, object]:
        return {
            "regime": "graph", "op": op, "M": m, "N": 64, "K": k, "contender": contender, "ms": 2.0, "floor_ms": 1.0,
        }  # fmt: skip

    rows = [
        row(op, who, m, k) for op in OPERATORS for who in ("cublas", "mkcompile") for m in (1, 8) for k in (64, 128)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    plot_small.main(str(tmp_path / "rows.jsonl"), str(tmp_path / "plots"))
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {f"{op}_few_rows.png" for op in OPERATORS}
