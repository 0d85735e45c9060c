"""`python -m mkcompile trace`, without GPUs: what it says, and timelines that are read from files. All synthetic."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

from mkcompile.inspect import cli
from mkcompile.inspect.trace import picture
from mkcompile.runtime.trace.file import Timeline, write
from tests.runtime.synthetic_trace import rank_trace


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "recorded.json"
    write(Timeline.of([rank_trace(0, 0), rank_trace(1, 70_000)], synthetic=True), path)
    return path


def test_a_recorded_timeline_is_summed_up_and_drawn(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawing = tmp_path / "trace.png"
    assert cli.main(["trace", "--from", str(recorded), "--png", str(drawing)]) == 0
    out = capsys.readouterr().out
    assert "synthetic, not measured" in out and "rank 1: 312 records, clock aligned to 10.50 us" in out
    pixels = imread(drawing)
    for name in ("mainloop", "push", "signal"):
        colour = [int(picture.COLOURS[name][i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (abs(pixels[..., :3] - colour).max(axis=-1) < 0.01).sum() > 100, f"no {name} is drawn"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give either MODULE:FUNCTION or --op"),
        (["--op", "gemm_all_reduce"], "--op needs --shape"),
        (["--op", "gemm_all_reduce", "--shape", "1,2"], "three numbers"),
        (["--op", "gemm_all_reduce", "--shape", "1,2,3", "--steps", "0"], "--steps must be at least 1"),
        (["--from", "nowhere.json"], "is no timeline of mkcompile"),
    ],
)
def test_wrong_use_is_explained(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", *arguments]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="torch.cuda.device_count() > 1: there are GPUs to trace on")
def test_without_gpus_it_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", "--op", "gemm_all_reduce", "--shape", "128,128,128"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "at least two CUDA GPUs" in said and "--from FILE" in said
