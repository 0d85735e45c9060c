"""The host proxy: is its library there, and what does each transport say when it is opened on a little host memory?"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mkcompile.errors import ProxyUnavailableError
from mkcompile.inspect.doctor.check import Check
from mkcompile.runtime.proxy.bootstrap import PREFERENCE
from mkcompile.runtime.proxy.library import library
from mkcompile.runtime.proxy.trial import Trial, try_transport

__all__ = ["Trial", "check", "check_of", "try_transports"]


def try_transports() -> list[Trial]:
    """Open each transport that can be chosen automatically, alone and without a peer, on host memory and a GPU's.

    Raises: ProxyUnavailableError where there is no library.
    """
    library()
    gpu = torch.device("cuda", 0) if torch.cuda.is_available() else None
    return [try_transport(name, gpu) for name in PREFERENCE]


def check() -> Check:
    """The library and all transports."""
    try:
        return check_of(try_transports())
    except ProxyUnavailableError as error:
        return Check(
            name="host proxy",
            status="missing",
            found=str(error),
            cost="groups that span nodes are left to the process group's own collectives",
            remedy="apt-get install g++, then reinstall mkcompile (in a checkout: make proxy)",
        )


def check_of(trials: Sequence[Trial]) -> Check:
    """`ok` where a NIC could be opened, `off` where only sockets are left."""
    works = [trial.transport for trial in trials if not trial.problem]
    return Check(
        name="host proxy",
        status="ok" if works and works != ["tcp"] else "off" if works else "broken",
        found="; ".join(map(str, trials)),
        cost="across nodes, data goes over sockets and through host memory" if works else "no way to other nodes",
        remedy="see verbs devices and libibverbs",
    )
