"""The proxy over real ibverbs, in a pair of virtual machines with Soft-RoCE.

`make test` runs it with few messages, `make test-rdma` with all. Where it can't run the reason is printed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.host.conftest import ROOT, build

RUN_VM = ROOT / "tools" / "rdma" / "run_vm.sh"
GUEST = Path(__file__).parent / "guest.sh"
CANNOT_RUN, NOT_BOOTED = 100, range(101, 106)
#: Messages each way of the long runs; faults of a transport together, and runs between the machines, have a tenth.
FEW, ALL = 3000, 100_000
FAULTS = ("full_queue_loses_nothing", "wrong_key", "has_left", "killed_process", "nobody_takes", "link_that_goes_down")
EXPECTED = {
    "device": ("address_are_named", "not_there_is_named"),
    "rc": (
        "every_byte_arrives",
        "several_connections",
        "have_no_order",
        "bounce_buffer",
        "many_messages",
        "pyverbs_writes_to_us_and_reads",
        *FAULTS,
    ),
    "unordered": (
        "every_byte_arrives",
        "bounce_buffer",
        "nobody_counts_come_too_early",
        "many_messages",
        "takes_nothing",
        "pyverbs_writes_to_us_and_reads",
        *FAULTS,
    ),
    "srd": ("says_what_is_missing",),
    "pair/rc": ("every_byte", "killed_process", "link_that_goes_down", "link_is_back"),
    "pair/unordered": ("every_byte", "killed_process", "link_that_goes_down"),
}
#: Of a machine; with all messages they need about 200 on two idle cores.
LIMIT_S = 600
#: In `make test-rdma` only: two processes with torch, whose start alone takes half a minute there.
BOOTSTRAP = ("chosen_where_all_have_it", "meet_through_the_store", "killed_peer_is_named")
DOCTOR = ("rxe0", "rxe1", "RoCE v2")
COUNTS = (pytest.param(FEW, id="few"), pytest.param(ALL, id="all", marks=pytest.mark.slow))


@pytest.fixture(scope="module")
def output(request: pytest.FixtureRequest) -> Iterator[str]:
    if not Path("/usr/include/infiniband/verbs.h").is_file():
        pytest.skip("no infiniband/verbs.h (tools/rdma/run_vm.sh -i installs what is needed)")
    build("--target", "mkproxy_rdma_tests")
    build()  # what torch's processes load
    with_torch = "yes" if request.param == ALL else ""
    variables = ("-e", f"MK_RDMA_MESSAGES={request.param}", "-e", f"WITH_TORCH={with_torch}")
    command = [str(RUN_VM), "-p", "-t", str(LIMIT_S), *variables, str(GUEST)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S + 60, check=False)
    # `make test-rdma` is asked for machines, `make test` runs wherever it is
    if done.returncode == CANNOT_RUN or (done.returncode in NOT_BOOTED and request.param == FEW):
        pytest.skip(f"status {done.returncode}: {done.stderr.strip()[-500:]}")
    assert done.returncode == 0, done.stdout + done.stderr
    sys.stdout.write(done.stdout)  # `make test-rdma` shows it
    yield done.stdout


@pytest.mark.parametrize("output", COUNTS, indirect=True)
@pytest.mark.parametrize("kind", EXPECTED)
def test_the_proxy_works_over_real_verbs(output: str, kind: str) -> None:
    passed = re.findall(rf"^[ab]: ok {kind}/(\S+)", output, re.MULTILINE)
    for part in EXPECTED[kind]:
        assert any(part in name for name in passed), f"{kind}: {part} did not run\n{output}"


@pytest.mark.parametrize("output", COUNTS, indirect=True)
def test_doctor_names_the_devices_and_their_addresses(output: str) -> None:
    seen = re.search(r"^a: ok doctor/(.*)", output, re.MULTILINE)
    assert seen and all(part in seen[1] for part in DOCTOR), output


@pytest.mark.slow
@pytest.mark.parametrize("output", [ALL], indirect=True, ids=["all"])
def test_proxies_meet_through_the_groups_store(output: str) -> None:
    for part in BOOTSTRAP:
        assert len(re.findall(rf"^[ab]: ok bootstrap/rc/\w*{part}", output, re.MULTILINE)) == 2, output
