"""The proxy over real ibverbs, in QEMU with two Soft-RoCE devices. `make test-rdma` installs what it needs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.host.conftest import ROOT, build

RUN_VM = ROOT / "tools" / "rdma" / "run_vm.sh"
GUEST = Path(__file__).parent / "guest.sh"
CANNOT_RUN = 100
EXPECTED = {
    "rc": ("every_byte", "several_connections", "many_messages", "full_queue", "wrong_key", "has_left", "lost_peer"),
    "unordered": ("every_byte", "nobody_counts", "many_messages", "full_queue", "wrong_key", "has_left"),
    "srd": ("says_what_is_missing",),
    "device": ("address_are_named", "not_there_is_named"),
}


@pytest.fixture(scope="module")
def output() -> str:
    if not Path("/usr/include/infiniband/verbs.h").is_file():
        pytest.skip("no infiniband/verbs.h (make test-rdma installs what is needed)")
    build("--folder", str(ROOT / "build" / "host-rdma"), "--target", "mkproxy_rdma_tests", "--", "-DMK_TESTS=ON")
    done = subprocess.run([RUN_VM, "-t", "200", GUEST], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode == CANNOT_RUN:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXPECTED)
def test_the_proxy_works_over_real_verbs(output: str, kind: str) -> None:
    passed = re.findall(rf"^ok {kind}/(\S+)", output, re.MULTILINE)
    for part in EXPECTED[kind]:
        assert any(part in name for name in passed), f"{kind}: {part} did not run\n{output}"
