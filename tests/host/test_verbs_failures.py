"""Failures of NICs as typed exceptions, over a stand-in for libibverbs: raised by each call from the next one on."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mkcompile.runtime.proxy.library import missing
from tests.host.conftest import ROOT

STANDIN = Path(__file__).parent / "standin"
SOURCES = ("verbs.cc", "requests.cc", "wire.cc", "control.cc")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, proxy_library: None) -> dict[str, Any]:
    if "built without" in missing("rc"):
        pytest.skip(missing("rc"))
    library = tmp_path_factory.mktemp("standin") / "libibverbs.so.1"
    flags = ("-std=c++20", "-O1", "-fPIC", "-shared", "-pthread", "-Wl,-soname,libibverbs.so.1")
    sources = [str(STANDIN / name) for name in SOURCES]
    subprocess.run(["g++", *flags, f"-I{ROOT / 'csrc'}", *sources, "-o", str(library)], check=True, timeout=300)
    command = [sys.executable, "-m", "tests.host.verbs_ranks", str(library)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_messages_go_each_way_however_memory_is_reached(seen: dict[str, Any]) -> None:
    assert seen["works"] == {"right": True, "registration": "host", "counts": False}
    assert seen["bounced"] == {"right": True, "registration": "bounce buffer", "counts": True}
    assert seen["unordered"] == {"right": True, "registration": "host", "counts": True}
    assert seen["trial"] == "rc: nic0/1 gid 0, memory registered: host, flags by the NIC"


@pytest.mark.parametrize(("case", "number"), [("killed", errno.ETIMEDOUT), ("unplugged", errno.ENETDOWN)])
def test_a_lost_peer_is_raised_by_every_later_call(seen: dict[str, Any], case: str, number: int) -> None:
    for one in seen[case]:
        assert one["type"] == "PeerLostError"
        assert (one["call"], one["peer"], one["errno"]) == ("rdma write", 7, number)
        assert one["device"] == "nic0/1 gid 0"


def test_memory_out_of_reach_and_a_missing_device_are_typed(seen: dict[str, Any]) -> None:
    assert (seen["refused"]["type"], seen["refused"]["errno"]) == ("RegistrationError", errno.EFAULT)
    assert "dma-buf: not exported; nvidia-peermem: Bad address" in seen["refused"]["text"]
    for case, name, why in (("no device", "nic5", "no RDMA device of this name"), ("no port", "nic0/x", "no port's")):
        assert (seen[case]["type"], seen[case]["device"]) == ("NoDeviceError", name)
        assert why in seen[case]["text"] and "there are nic0, nic1" in seen[case]["text"]


def test_the_process_goes_on(seen: dict[str, Any]) -> None:
    assert seen["works after all"]["right"]
