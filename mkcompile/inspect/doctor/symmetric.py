"""Symmetric memory, tried: two processes that may hang or die, with a deadline."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from mkcompile.inspect.doctor.check import Check

DEADLINE_S = 90.0
NAME = "symmetric memory"
COST = "the fused kernels have no memory that peers can write, so operators run as ATen and NCCL calls"

# What such failures say -> what to do. Sources: pytorch#128762, moby#45622, pytorch#177472, #178989.
_ADVICE = (
    (
        "pidfd",
        "the container forbids pidfd_getfd: docker run --cap-add SYS_PTRACE (or a seccomp profile that allows it)",
    ),
    ("Operation not permitted", "docker run --cap-add SYS_PTRACE --ipc host"),
    ("401", "the fabric manager is not ready: systemctl restart nvidia-fabricmanager"),
    ("multicast", "set TORCH_SYMM_MEM_DISABLE_MULTICAST=1: the peer-to-peer path does not need it"),
    ("peer", "see the peer access matrix: not every pair of GPUs can reach each other"),
)


def check(num_gpus: int, commands: Sequence[Sequence[str]] | None = None, deadline_s: float = DEADLINE_S) -> Check:
    """Allocate, exchange, write to the peer and read back, in one process a GPU (two of them).

    `commands` replaces the two processes; tests use it.
    """
    if num_gpus < 2:
        remedy = "use a machine with two or more GPUs"
        return Check(name=NAME, status="off", found="not tried: it takes two GPUs", cost=COST, remedy=remedy)
    with tempfile.TemporaryDirectory() as folder:
        init = Path(folder) / "init"
        problem = run_ranks(commands or [_command(rank, init) for rank in range(2)], deadline_s)
    return Check(
        name=NAME,
        status="broken" if problem else "ok",
        found=problem or "two ranks wrote to each other",
        cost=COST,
        remedy=advice(problem),
    )


def _command(rank: int, init: Path) -> list[str]:
    return [sys.executable, "-m", "mkcompile.inspect.doctor.symmetric_rank", str(rank), str(init)]


def run_ranks(commands: Sequence[Sequence[str]], deadline_s: float) -> str:
    """Start all, wait until all have ended or the deadline passes; what went wrong, or an empty string."""
    ranks = [
        subprocess.Popen(one, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        for one in commands
    ]
    ends_at = time.monotonic() + deadline_s
    problems: list[str] = []
    try:
        for index, rank in enumerate(ranks):
            out, err = rank.communicate(timeout=max(ends_at - time.monotonic(), 0.01))
            if rank.returncode != 0:
                problems.append(f"rank {index}: {_last_line(out, err)}")
    except subprocess.TimeoutExpired:
        problems.append(f"rank {index} did not answer within {deadline_s:.0f} s")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return "; ".join(problems)


def _last_line(out: str, err: str) -> str:
    """The error that the rank wrote as JSON, else the last line of what it printed."""
    lines = [line for line in (out or err).strip().splitlines() if line.strip()]
    last = lines[-1] if lines else "died without a word"
    return str(json.loads(last)["error"]) if last.startswith("{") else last


def advice(problem: str) -> str:
    """What to do about a failure, by what it says."""
    found = [text for sign, text in _ADVICE if sign in problem]
    return found[0] if found else "run with TORCH_CPP_LOG_LEVEL=INFO and read the first error"
