"""The demo: it runs and agrees; it fails when a result is wrong, a rank raises, dies or hangs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from mkcompile.demo import run
from mkcompile.demo.show import agrees
from mkcompile.demo.work import Difference, Outcome
from mkcompile.errors import OptionError
from mkcompile.inspect.ranks import Launch, RankError, Say, run_ranks

ROOT = Path(__file__).parents[2]
LAUNCH = Launch(world_size=2, device="cpu", timeout_s=120.0)


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m mkcompile demo` on CPU ranks, with Inductor's compile workers: nothing else runs meanwhile."""
    command = [sys.executable, "-m", "mkcompile", "demo", "--device", "cpu", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_COMPILE_THREADS"}
    return subprocess.run(command, capture_output=True, text=True, timeout=620, cwd=ROOT, env=environment)


def test_it_agrees_explains_every_collective_and_writes_the_report(tmp_path: Path) -> None:
    page = tmp_path / "new" / "report.html"
    done = demo("--only", "training", "--html", str(page))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all results agree" in done.stdout
    assert "8 of 8 collectives fused" in done.stdout
    assert "<html" in page.read_text()


def test_a_wrong_operator_ends_it_with_an_error_status(tmp_path: Path) -> None:
    done = demo("--plant-error", "--only", "training", "--html", str(tmp_path / "report.html"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "DIFFERS" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ranks", "3"], "--ranks must divide the 4 heads: 1, 2, 4; got 3"),
        (["--ranks", "0"], "got 0"),
        (["--device", "cuda"], "--device cuda with 2 ranks needs as many GPUs; there are 0"),
    ],
)
def test_what_can_not_run_is_refused_before_ranks_start(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_usable_gpus", lambda: 0)
    with pytest.raises(OptionError, match=re.escape(says)):
        run.main(arguments)


@pytest.mark.slow
def test_both_models_agree_with_one_report_each(tmp_path: Path) -> None:
    done = demo("--html", str(tmp_path / "report.html"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 of 6 collectives fused" in done.stdout  # Llama: not the embedding's, not the head's
    assert "8 of 8 collectives fused" in done.stdout  # the sequence-parallel layer
    assert all("<html" in (tmp_path / name).read_text() for name in ("report.html", "report-2.html"))


def outcome(from_eager: float, from_inductor: float) -> Sequence[Outcome]:
    one = Difference(tensor="output", from_eager=from_eager, from_inductor=from_inductor)
    return [Outcome(name="model", differences=(one,), seconds={}, report=None)]


@pytest.mark.parametrize(
    ("from_eager", "from_inductor", "right"),
    [(1e-6, 1e-6, True), (1e-2, 1e-6, False), (1e-6, 1e-2, False), (float("nan"), 0.0, False)],
)
def test_it_agrees_only_within_the_tolerance(from_eager: float, from_inductor: float, right: bool) -> None:
    assert agrees(outcome(from_eager, from_inductor), 1e-4) is right


def rank_number(rank: int, say: Say) -> int:
    say("counting")
    return rank


def raises_on_one(rank: int, say: Say) -> None:
    say("adding")
    if rank == 1:
        raise ValueError("rank one is unhappy")
    threading.Event().wait()


def dies_on_one(rank: int, say: Say) -> None:
    if rank == 1:
        os._exit(3)
    threading.Event().wait()


def waits_for_ever(rank: int, say: Say) -> None:
    say("waiting")
    threading.Event().wait()


def test_results_come_in_rank_order_and_steps_are_reported() -> None:
    steps: list[tuple[int, str]] = []
    assert run_ranks(rank_number, LAUNCH, lambda rank, text: steps.append((rank, text))) == [0, 1]
    assert sorted(steps) == [(0, "counting"), (1, "counting")]


def test_a_rank_that_raises_ends_all_with_its_traceback() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 failed while adding.*ValueError: rank one is unhappy"):
        run_ranks(raises_on_one, LAUNCH, lambda rank, text: None)


def test_a_rank_that_dies_ends_all() -> None:
    with pytest.raises(RankError, match=r"rank 1 failed.*\n.*exit code 3"):
        run_ranks(dies_on_one, LAUNCH, lambda rank, text: None)


def test_a_hang_ends_with_who_hung_where() -> None:
    late = Launch(world_size=1, device="cpu", timeout_s=20.0)
    with pytest.raises(RankError, match=r"out of time; still running: rank 0 \((waiting|starting)\)"):
        run_ranks(waits_for_ever, late, lambda rank, text: None)
