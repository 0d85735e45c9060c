"""NVIDIA's memcheck over small shapes of every operator: no access outside of what belongs to the kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHAPES = Path(__file__).with_name("memcheck_shapes.py")
_LIMIT_S = 300


def sanitizer() -> str | None:
    """The tool: on the path, in the toolkit, or from a wheel."""
    wheels = Path(sysconfig.get_path("purelib")) / "nvidia"
    folders = [
        *os.environ.get("PATH", "").split(os.pathsep),
        "/usr/local/cuda/bin",
        "/usr/local/cuda/compute-sanitizer",
    ]
    folders += [str(path.parent) for path in wheels.rglob("compute-sanitizer") if path.is_file()]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


@pytest.mark.parametrize("part", ["blocks", "transfers"])
def test_small_shapes_touch_nothing_else(part: str) -> None:
    tool = sanitizer()
    if tool is None:
        pytest.skip("no compute-sanitizer in PATH, /usr/local/cuda or the nvidia wheels")
    done = subprocess.run(
        [tool, "--tool", "memcheck", "--error-exitcode", "86", sys.executable, str(SHAPES), part],
        cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT_S, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )  # fmt: skip
    said = done.stdout + done.stderr
    if done.returncode != 86 and "not supported" in said.lower():
        pytest.skip(f"compute-sanitizer can't run here: {said.strip().splitlines()[-1]}")
    assert done.returncode == 0 and "ERROR SUMMARY: 0 errors" in said, said[-4000:]
    assert "launches checked" in said, said[-4000:]
