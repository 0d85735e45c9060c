"""Two nodes on one machine: network namespaces that a virtual cable joins. Nothing tells the ranks any address."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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


@contextmanager
def two_nodes() -> Iterator[Nodes]:
    """Both namespaces, until the block ends; where `refusal` says nothing."""
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
