"""`python -m mkcompile tune`: what is to be tuned, and where."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import pytest

from mkcompile.inspect import cli
from mkcompile.inspect.commands import tune
from mkcompile.ops.problem import Problem
from mkcompile.plan import tune_command


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Problem], str]]:
    """Problems and backend of each run; nothing is started."""
    runs: list[tuple[list[Problem], str]] = []

    def run(options: argparse.Namespace, problems: Sequence[Problem], where: tune_command.Where) -> int:
        runs.append((list(problems), where.backend))
        return 0

    monkeypatch.setattr(tune_command, "run", run)
    return runs


def test_every_operator_is_tuned_in_every_shape(started: list[Any]) -> None:
    operators = ["gemm_all_reduce", "gemm_reduce_scatter"]
    arguments = ["tune", "--op", *operators, "--shape", "64x128x256", "8x16x32", "--site", "all_gather_gemm:2x8x8"]
    assert cli.main([*arguments, "--ranks", "4", "--device", "cpu"]) == 0
    ((problems, backend),) = started
    assert backend == "gloo"
    assert [(one.operator, one.m, one.world_size) for one in problems] == [
        ("all_gather_gemm", 2, 4),
        *((operator, m, 4) for operator in operators for m in (64, 8)),
    ]


def test_the_sites_of_a_model_are_collected_once_each(started: list[Any]) -> None:
    arguments = ["tune", "tests.inspect.models:sequence_parallel_mlp", "--set", "width=128", "--device", "cpu"]
    assert cli.main(arguments) == 0
    ((problems, _),) = started
    assert len(problems) == len(set(problems)) >= 3
    assert {one.operator for one in problems} >= {"all_gather_gemm", "gemm_reduce_scatter"}
    assert all(one.world_size == 2 and one.m > 0 for one in problems)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--op", "gemm_all_reduce"], "--op and --shape belong together"),
        (["--op", "conv", "--shape", "1x2x3"], "operator:MxNxK"),
        (["nowhere"], "expected MODULE:FUNCTION"),
        (["--site", "gemm_all_reduce:8x8x8", "--device", "cuda", "--ranks", "1000"], "needs as many GPUs"),
    ],
)
def test_misuse_is_status_two_and_says_what_is_wrong(
    arguments: list[str], says: str, started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tune", *arguments]) == cli.MISUSED
    assert says in " ".join(capsys.readouterr().err.split())
    assert not started


def test_without_gpus_it_says_that_references_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.where("auto", 1000) is tune_command.CPU
    assert "GPUs for 1000 ranks: a rehearsal" in " ".join(capsys.readouterr().err.split())
