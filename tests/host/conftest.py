"""The proxy's library, built from this checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build(*arguments: str) -> None:
    """Bring a build up to date, or skip where this machine has no compiler."""
    if not shutil.which("g++"):
        pytest.skip("no g++ on this machine")
    command = [sys.executable, str(ROOT / "tools" / "build_proxy.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session", autouse=True)
def proxy_library() -> None:
    build()
