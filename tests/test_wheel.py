"""An installed wheel is whole: kernel sources inside, entry point found, nothing of the checkout needed."""

from __future__ import annotations

import os
import shutil
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
from mkcompile.runtime.proxy.library import library, missing
assert library() and not missing("tcp")
"""

WITHOUT_COMPILER = """
from mkcompile.errors import ProxyUnavailableError
from mkcompile.runtime.proxy.library import library
try:
    library()
except ProxyUnavailableError as error:
    assert "apt-get install g++" in str(error), error
else:
    raise AssertionError("a proxy from nowhere")
"""


#: An editable installation's finder goes before PYTHONPATH: the tests' own environment has one.
WITHOUT_EDITABLE = """
import sys
sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in type(one).__module__]
"""


def build_wheel(folder: Path, *options: str, **environment: str) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), *options, str(ROOT)]
    subprocess.run(command, check=True, timeout=300, env={**os.environ, **environment})
    return next(folder.glob("mkcompile-*.whl"))


def run_installed(wheel: Path, folder: Path, program: str) -> None:
    site = folder / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, timeout=300)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-c", WITHOUT_EDITABLE + program]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


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
    run_installed(wheel, tmp_path, PROGRAM.format(root=str(ROOT)))


@pytest.mark.skipif(not shutil.which("g++"), reason="no g++ on this machine")
def test_a_wheel_serves_every_python_of_its_platform(wheel: Path) -> None:
    assert "-py3-none-linux_" in wheel.name


def test_a_machine_without_a_compiler_gets_a_package_without_the_proxy(tmp_path: Path) -> None:
    options = ("-C", f"build-dir={tmp_path / 'build'}")
    pure = build_wheel(tmp_path / "wheel", *options, CXX="/bin/false")
    assert pure.name.endswith("-py3-none-any.whl")
    run_installed(pure, tmp_path, WITHOUT_COMPILER)
