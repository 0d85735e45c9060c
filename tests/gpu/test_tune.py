"""`tune` on two GPUs: candidates of each kind are launched and timed, and a second run measures nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SITES = ("gemm_all_reduce:256x1024x512", "gemm_reduce_scatter:256x1024x512", "all_gather_gemm:1024x1024x512")


def tune(folder: Path, sweep: Path) -> list[dict[str, Any]]:
    """The sweep's rows of one run."""
    sites = [part for site in SITES for part in ("--site", site)]
    command = [sys.executable, "-m", "mkcompile", "tune", "--device", "cuda", *sites, "--rounds", "2"]
    command += ["--timeout", "150", "--folder", str(folder), "--sweep", str(sweep)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return [json.loads(line) for line in sweep.read_text().splitlines()]


@pytest.mark.gpu2
def test_candidates_are_timed_and_kept(tmp_path: Path) -> None:
    rows = tune(tmp_path / "kept", tmp_path / "first.jsonl")
    failed = [row for row in rows if row["error"]]
    assert not failed, failed[:3]
    assert all(0 < row["us"] < 5e4 for row in rows)
    kinds = {(row["op"], row["variant"]) for row in rows}
    assert {(site.partition(":")[0], "unfused") for site in SITES} <= kinds
    assert {("gemm_all_reduce", "stream"), ("gemm_reduce_scatter", "push"), ("all_gather_gemm", "push")} <= kinds
    again = tune(tmp_path / "kept", tmp_path / "second.jsonl")
    assert [row["us"] for row in again] == [row["us"] for row in rows], "what was measured is not measured again"
