"""An installed wheel is whole: kernel sources inside, entry point found, nothing of the checkout needed."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

PROGRAM = """
import sys, torch
from torch._dynamo import list_backends
assert "mkernel" in list_backends(), list_backends()
from mkcompile.runtime import nvrtc
import mkcompile
assert {root!r} not in mkcompile.__file__, mkcompile.__file__
compiled = torch.compile(torch.nn.Linear(8, 8), backend="mkernel", options={{"mkernel.fuse": "never"}})
with torch.no_grad():
    compiled(torch.ones(2, 8))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)]
    subprocess.run(command, check=True, timeout=300)
    return next(folder.glob("mkcompile-*.whl"))


def test_wheel_holds_every_kernel_source_and_data_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    device = {p.relative_to(ROOT) for p in (ROOT / "csrc").rglob("*") if p.suffix in (".h", ".cuh", ".cc", ".hpp")}
    package = {
        p.relative_to(ROOT) for p in (ROOT / "mkcompile").rglob("*") if p.is_file() and "__pycache__" not in p.parts
    }
    missing = {f"mkcompile/{path.as_posix()}" for path in device} | {path.as_posix() for path in package}
    assert device and not missing - names


def test_installed_wheel_works_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, timeout=300)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    program = [sys.executable, "-c", PROGRAM.format(root=str(ROOT))]
    done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
