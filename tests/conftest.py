"""What holds for every test: one thread, no pool of compile workers, an Inductor cache that is not the user's."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

# Read when torch and Inductor are imported, here and in the server that tests/spawn.py forks its ranks from. No pool
# of compile workers: two cores are shared by all ranks, and nothing may outlive the tests.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# Inductor would compile two probes in every new cache folder to see that the CPU has the vector units which it says.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"

_CACHE = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """A cache folder of this test session: for this process, the workers of `-n 2`, and the ranks that they start."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.stash[_CACHE] = tempfile.mkdtemp(prefix="mkcompile-inductor-")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = config.stash[_CACHE]


def pytest_unconfigure(config: pytest.Config) -> None:
    """Nothing of it stays."""
    if _CACHE in config.stash:
        shutil.rmtree(config.stash[_CACHE], ignore_errors=True)


@pytest.fixture(scope="module")
def group(request: pytest.FixtureRequest) -> Iterator[None]:
    """A fake group of the module's `WORLD_SIZE` ranks; its name is "0"."""
    from tests.captured import fake_group  # torch reads the settings above when it is imported

    with fake_group(request.module.WORLD_SIZE) as name:
        assert name == "0"
        yield
