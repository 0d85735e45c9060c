"""Does a transport work on this machine? Asked by opening it on a little host memory, alone and without a peer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mkcompile.errors import TransportError
from mkcompile.runtime.proxy.library import missing
from mkcompile.runtime.proxy.session import Place, Proxy
from mkcompile.runtime.proxy.settings import Hooks, ProxyConfig, Region, Ring, Transport

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


def try_transport(name: Transport) -> Trial:
    """Open it and close it again.

    Raises: ProxyUnavailableError where there is no library.
    """
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
