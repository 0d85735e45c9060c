"""The C++ tests of this folder under a sanitizer: protocol, proxy, and all transports within one process."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.host.conftest import ROOT, build

# data races on purpose: nobody counts what has arrived, so a flag can come before its data
RACY = ("emulated/flags_that_nobody_counts_come_too_early", "rc/order_that_a_nic_does_not_keep_is_seen")
# over a stand-in for libibverbs, which is built where its header is
VERBS = ("rc/", "unordered/", "srd/", "bounce/", "registration/", "gid/")
HAS_VERBS = Path("/usr/include/infiniband/efadv.h").is_file()


def program(sanitizer: str) -> Path:
    folder = ROOT / "build" / f"host-{sanitizer.replace(',', '-')}"  # the linker takes a comma apart
    options = ("-DMK_TESTS=ON", f"-DMK_SANITIZE={sanitizer}", "-DCMAKE_BUILD_TYPE=None")
    build("--folder", str(folder), "--target", "mkproxy_tests", "--", *options)
    return folder / "mkproxy_tests"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    # where addresses are placed at random, ThreadSanitizer of GCC 12 can find no room for its shadow
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []
    return subprocess.run([*fixed, *command], capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def with_thread_sanitizer() -> str:
    return str(program("thread"))


def test_no_data_race(with_thread_sanitizer: str) -> None:
    done = run(with_thread_sanitizer, "--without", *RACY)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stdout + done.stderr
    assert done.stdout.count("ok ") > 30
    assert not HAS_VERBS or all(f"ok {kind}" in done.stdout for kind in VERBS), done.stdout


def test_a_data_race_would_be_found(with_thread_sanitizer: str) -> None:
    done = run(with_thread_sanitizer, RACY[0])
    assert done.returncode != 0 and "data race" in done.stderr, done.stdout + done.stderr


@pytest.mark.skipif(not HAS_VERBS, reason="no infiniband/efadv.h (apt-get install libibverbs-dev)")
def test_a_data_race_of_a_nic_would_be_found(with_thread_sanitizer: str) -> None:
    done = run(with_thread_sanitizer, RACY[1])
    assert "data race" in done.stderr, done.stdout + done.stderr


@pytest.mark.slow
def test_no_bad_access_and_no_leak() -> None:
    done = run(str(program("address,undefined")))
    assert done.returncode == 0 and "ERROR" not in done.stderr, done.stdout + done.stderr
    assert "runtime error" not in done.stderr, done.stderr
