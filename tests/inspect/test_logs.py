"""What the pass leaves in torch's own logs: lines under TORCH_LOGS, artifacts under TORCH_TRACE."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import torch
import mkcompile
from mkcompile.inspect.offline import fake_world
from tests.inspect.models import by_hand

with fake_world(4), torch.no_grad():
    model, args = by_hand()
    mkcompile.explain(model, *args, options={"mkernel.fuse": "always"})
"""


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What one process wrote to its log and to its trace."""
    folder = tmp_path_factory.mktemp("trace")
    environment = {**os.environ, "TORCH_TRACE": str(folder), "TORCH_LOGS": "+mkcompile"}
    command = [sys.executable, "-c", PROGRAM]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr, "".join(one.read_text() for one in folder.iterdir())


def test_torch_logs_takes_our_name(traced: tuple[str, str]) -> None:
    log, _ = traced
    assert "1 of 1 collectives fused" in log and "fused as gemm_all_reduce" in log


def test_the_rewritten_graph_is_a_tlparse_artifact(traced: tuple[str, str]) -> None:
    _, trace = traced
    names = [line for line in trace.splitlines() if '"artifact"' in line and "mkcompile_" in line]
    assert len(names) == 2
    assert "torch.ops.mkcompile.gemm_all_reduce.default" in trace
    payload = trace.split('"mkcompile_sites"', 1)[1].split("\n", 1)[1]
    (site,) = json.JSONDecoder().raw_decode(_unindented(payload))[0]
    assert site["operator"] == "gemm_all_reduce" and site["reason"] is None


def _unindented(payload: str) -> str:
    """A trace's payload lines start with a tab."""
    return "\n".join(line.removeprefix("\t") for line in payload.splitlines())
