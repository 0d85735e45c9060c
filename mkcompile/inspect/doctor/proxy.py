"""The host proxy: is its library there, and what does each transport say when it is opened on a little host memory?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mkcompile.errors import ProxyUnavailableError, TransportError
from mkcompile.inspect.doctor.check import Check
from mkcompile.runtime.proxy import Hooks, Place, Proxy, ProxyConfig, Region, Ring
from mkcompile.runtime.proxy.library import library, missing
from mkcompile.runtime.proxy.settings import Transport

_TRIED: tuple[Transport, ...] = ("srd", "rc", "tcp")
_REGION_BYTES = 1 << 16
_LIMIT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What came of opening one transport. `device` and `registration` are empty where `problem` says why not."""

    transport: str
    device: str = ""
    registration: str = ""
    problem: str = ""

    def __str__(self) -> str:
        if self.problem:
            return f"{self.transport}: {self.problem}"
        return f"{self.transport}: {self.device}, memory registered: {self.registration}"


def try_transports() -> list[Trial]:
    """Open each transport that can be chosen automatically, alone and without a peer.

    Raises: ProxyUnavailableError where there is no library.
    """
    library()
    return [_try(name) for name in _TRIED]


def _try(name: Transport) -> Trial:
    if problem := missing(name):
        return Trial(transport=name, problem=problem)
    memory = torch.zeros(_REGION_BYTES, dtype=torch.uint8)
    region = Region(address=memory.data_ptr(), size_bytes=_REGION_BYTES, flags_offset_bytes=0, num_flags=1, keep=memory)
    place = Place(rank=0, ranks=(0, 1), timeout_s=_LIMIT_S)
    try:
        proxy = Proxy(place, region, ProxyConfig(transport=name), Hooks(), Ring())
    except TransportError as error:
        return Trial(transport=name, problem=str(error))
    trial = Trial(transport=name, device=proxy.device, registration=proxy.registration)
    proxy.close(0)
    return trial


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
