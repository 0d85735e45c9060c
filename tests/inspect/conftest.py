"""A world of four ranks that does not exist, and reports that several tests read."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mkcompile.inspect.explain import Request, explain_request
from mkcompile.inspect.offline import fake_world
from mkcompile.inspect.report import Report
from tests.inspect.models import sequence_parallel_mlp, tensor_parallel_mlp

_INSTALL_DEADLINE_S = 400


@pytest.fixture
def world() -> Iterator[None]:
    """Four ranks of which this is rank 0."""
    with fake_world(4):
        yield


@pytest.fixture(scope="session")
def tensor_report() -> Report:
    """Column- and row-parallel linears, forward and backward, planned for eight H200."""
    with fake_world(4):
        model, args = tensor_parallel_mlp(width=4096, tokens=4096)
        return explain_request(Request(model=model, args=args, options={"mkernel.topology": "8xh200"}))


@pytest.fixture(scope="session")
def sequence_report() -> Report:
    """The same in sequence parallelism: gathers and scatters, also the one that a weight gradient reads."""
    with fake_world(4):
        model, args = sequence_parallel_mlp(width=4096, tokens=4096)
        return explain_request(Request(model=model, args=args, options={"mkernel.topology": "8xh200"}))


@pytest.fixture(scope="session")
def chromium() -> str:
    """The browser; installed where this is Debian and we may, else the tests are skipped with the reason."""
    found = shutil.which("chromium")
    if found:
        return found
    if not shutil.which("apt-get") or os.geteuid() != 0:
        pytest.skip("no chromium on the path, and apt-get as root is not to be had")
    command = ["apt-get", "install", "-y", "--no-install-recommends", "chromium"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_DEADLINE_S, check=False)
    if done.returncode != 0:
        pytest.skip(f"apt-get install chromium: {done.stderr.strip().splitlines()[-1]}")
    return str(Path("/usr/bin/chromium"))
