"""Headers of the kernels, built for the CPU: the integer arithmetic of schedules, which tests walk."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from mkcompile.runtime.sources import csrc_folder


@cache
def built(source: str) -> ctypes.CDLL:
    """A translation unit that includes such headers, with `extern "C"` functions for the test."""
    with tempfile.TemporaryDirectory(prefix="mkcompile-header-") as name:
        folder = Path(name)
        (folder / "walk.cc").write_text(source)
        command = ["g++", "-std=c++20", "-O2", "-shared", "-fPIC", f"-I{csrc_folder()}", "walk.cc", "-o", "walk.so"]
        subprocess.run(command, cwd=folder, check=True)
        return ctypes.CDLL(str(folder / "walk.so"))
