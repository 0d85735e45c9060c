"""What holds for every test: one thread, no pool of compile workers, an Inductor cache that is not the user's."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Read when torch and Inductor are imported, here and in the server that tests/spawn.py forks its ranks from. No pool
# of compile workers: two cores are shared by all ranks, and nothing may outlive the tests.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# Inductor would compile two probes in every new cache folder to see that the CPU has the vector units which it says.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"


@pytest.fixture(scope="session", autouse=True)
def inductor_cache() -> Iterator[Path]:
    """A cache folder of this test session, set for this process and for the ranks it starts."""
    folder = Path(tempfile.mkdtemp(prefix="mkcompile-inductor-"))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
