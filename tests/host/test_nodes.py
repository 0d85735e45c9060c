"""Two nodes on one machine, joined by a virtual cable: bytes in both directions, and a link that goes down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.host.conftest import ROOT
from tests.host.namespaces import LINK, Nodes, refusal, two_nodes
from tests.host.node_rank import LIMIT_S, MESSAGES


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    if reason := refusal():
        pytest.skip(f"no network namespaces here: {reason}")
    with two_nodes() as made:
        yield made


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
