"""Two nodes on one machine: network namespaces that a virtual cable joins. Nothing tells the ranks any address."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.host.conftest import ROOT
from tests.host.node_rank import LIMIT_S, MESSAGES

LINK = "mk0"
# the same in both namespaces, as docker0 is on every node of a cluster: an address that leads nowhere
DECOY = "172.17.0.1/16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Names of two namespaces."""

    names: tuple[str, str]


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20, check=False)


def refusal() -> str:
    """Why this machine gives us no namespaces; empty where it does."""
    if not shutil.which("ip"):
        return "no `ip` (apt-get install iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"mk-try-{os.getpid()}"
    tried = ip("netns", "add", name)
    made = ip("-n", name, "link", "add", LINK, "type", "veth", "peer", "name", "mk1") if not tried.returncode else tried
    ip("netns", "delete", name)
    return made.stderr.strip() if made.returncode else ""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    if reason := refusal():
        pytest.skip(f"no network namespaces here: {reason}")
    names = (f"mk-a-{os.getpid()}", f"mk-b-{os.getpid()}")
    try:
        for name in names:
            assert not ip("netns", "add", name).returncode
        ip("-n", names[0], "link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", names[1])
        for number, name in enumerate(names):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "add", "decoy", "type", "veth", "peer", "name", "decoy1")
            ip("-n", name, "address", "add", DECOY, "dev", "decoy")
            ip("-n", name, "link", "set", "decoy", "up")
            ip("-n", name, "address", "add", f"10.77.0.{number + 1}/24", "dev", LINK)
            assert not ip("-n", name, "link", "set", LINK, "up").returncode
        yield Nodes(names=names)
    finally:
        for name in names:
            ip("netns", "delete", name)


@pytest.fixture(scope="module")
def seen(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("nodes")
    return run_ranks(nodes, folder)


def run_ranks(nodes: Nodes, folder: Path) -> list[dict[str, Any]]:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": LINK, "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank, name in enumerate(nodes.names):
        program = [sys.executable, "-m", "tests.host.node_rank", str(rank), str(folder), LINK]
        command = ["ip", "netns", "exec", name, *program]
        ranks.append(
            subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        outputs = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for output, errors in outputs:
        assert output.strip(), errors
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


def test_nodes_find_each_other_and_exchange_bytes(seen: list[dict[str, Any]]) -> None:
    for one in seen:
        assert one["right"] == MESSAGES
        assert one["device"] == LINK


def test_a_link_that_goes_down_is_a_lost_peer_within_the_deadline(seen: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(seen):
        assert one["error"] == f"PeerLostError of peer {1 - rank}"
        assert one["took_s"] < 5 * LIMIT_S
