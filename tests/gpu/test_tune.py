"""`tune` on GPUs: candidates of each kind are launched and timed, and a second run measures nothing.

On one GPU, which two ranks have by turns, all of it but the command line and NCCL; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import by_turns
from mkcompile.plan import tune_command
from mkcompile.plan.topology import preset
from mkcompile.runtime.measure import KernelMeasurer, gpu_bench

ROOT = Path(__file__).parents[2]
SITES = ("gemm_all_reduce:256x1024x512", "gemm_reduce_scatter:256x1024x512", "all_gather_gemm:1024x1024x512")


def arguments(folder: Path, sweep: Path, timeout_s: int) -> list[str]:
    """Of the command."""
    sites = [part for site in SITES for part in ("--site", site)]
    return [*sites, "--rounds", "2", "--timeout", str(timeout_s), "--folder", str(folder), "--sweep", str(sweep)]


def tune(folder: Path, sweep: Path) -> None:
    """One run of the command on two GPUs."""
    command = [sys.executable, "-m", "mkcompile", "tune", "--device", "cuda", *arguments(folder, sweep, 150)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]


def tune_by_turns(folder: Path, sweep: Path) -> None:
    """One run of two ranks on the first GPU."""
    parser = argparse.ArgumentParser(parents=[tune_command.parser()])
    where = tune_command.Where(backend="cpu:gloo,cuda:gloo", make_bench=bench_by_turns)
    options = parser.parse_args(arguments(folder, sweep, 100))
    assert tune_command.run(options, tune_command.problems_of(options), where) == 0


def bench_by_turns() -> tune_command.Bench:
    """In a rank."""
    by_turns.plan_as(preset("2xh200"))
    torch.cuda.set_device(0)
    _collectives()
    bench = gpu_bench()
    assert isinstance(bench.measurer, KernelMeasurer)
    return replace(bench, measurer=replace(bench.measurer, platform=by_turns.SharedPlatform()))


@cache
def _collectives() -> torch.library.Library:
    """Kept as long as the process."""
    return by_turns.install(torch.device("cuda", 0))


def check(first: Path, second: Path) -> None:
    """Every kind was timed, and nothing again."""
    rows, again = ([json.loads(line) for line in one.read_text().splitlines()] for one in (first, second))
    failed: list[dict[str, Any]] = [row for row in rows if row["error"]]
    assert not failed, failed[:3]
    assert all(0 < row["us"] < 5e5 for row in rows)
    kinds = {(row["op"], row["variant"]) for row in rows}
    assert {(site.partition(":")[0], "unfused") for site in SITES} <= kinds
    assert {("gemm_all_reduce", "stream"), ("gemm_reduce_scatter", "push"), ("all_gather_gemm", "push")} <= kinds
    assert [row["us"] for row in again] == [row["us"] for row in rows], "what was measured is not measured again"


@pytest.mark.gpu2
def test_candidates_are_timed_and_kept(tmp_path: Path) -> None:
    for name in ("first", "second"):
        tune(tmp_path / "kept", tmp_path / f"{name}.jsonl")
    check(tmp_path / "first.jsonl", tmp_path / "second.jsonl")


def test_candidates_are_timed_and_kept_by_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible.split(",")[0])  # in the ranks
    for name in ("first", "second"):
        tune_by_turns(tmp_path / "kept", tmp_path / f"{name}.jsonl")
    check(tmp_path / "first.jsonl", tmp_path / "second.jsonl")
