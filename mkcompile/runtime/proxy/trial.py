"""Does a transport work on this machine? Asked by opening it on a little host memory, alone and without a peer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mkcompile.errors import TransportError
from mkcompile.runtime.proxy.cuda import cuda_hooks, exported, open_engine
from mkcompile.runtime.proxy.library import missing
from mkcompile.runtime.proxy.session import Place, Proxy
from mkcompile.runtime.proxy.settings import Hooks, ProxyConfig, Region, Ring, Transport

_REGION_BYTES = 1 << 16
_LIMIT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What came of opening one transport. `device` and `registration` are empty where `problem` says why not.

    `gpu_registration`: the same for memory of the first GPU; empty where there is none. `counts`: flags in it are
    published by the proxy, else by the senders' NICs.
    """

    transport: str
    device: str = ""
    registration: str = ""
    problem: str = ""
    gpu_registration: str = ""
    counts: bool = False

    def __str__(self) -> str:
        if self.problem:
            return f"{self.transport}: {self.problem}"
        by = "the proxy" if self.counts else "the NIC"
        gpu = f", GPU memory: {self.gpu_registration}" if self.gpu_registration else ""
        return f"{self.transport}: {self.device}, memory registered: {self.registration}{gpu}, flags by {by}"


def try_transport(name: Transport, gpu: torch.device | None = None) -> Trial:
    """Open it and close it again; on memory of the GPU too, where one is given and the transport is a NIC's.

    Raises: ProxyUnavailableError where there is no library.
    """
    if problem := missing(name):
        return Trial(transport=name, problem=problem)
    memory = torch.zeros(_REGION_BYTES, dtype=torch.uint8)
    try:
        proxy = _open(name, _region_of(memory), Hooks())
    except TransportError as error:
        return Trial(transport=name, problem=str(error))
    trial = Trial(transport=name, device=proxy.device, registration=proxy.registration, counts=proxy.counts)
    proxy.close(0)
    return trial if gpu is None or name == "tcp" else _on_gpu(trial, name, gpu)


def _region_of(memory: torch.Tensor) -> Region:
    return Region(
        address=memory.data_ptr(),
        size_bytes=memory.numel(),
        flags_offset_bytes=0,
        num_flags=1,
        is_cuda=memory.is_cuda,
        keep=memory,
    )


def _open(name: Transport, region: Region, hooks: Hooks) -> Proxy:
    place = Place(rank=0, ranks=(0, 1), timeout_s=_LIMIT_S)
    return Proxy(place, region, ProxyConfig(transport=name), hooks, Ring())


def _on_gpu(trial: Trial, name: Transport, gpu: torch.device) -> Trial:
    """How its NIC reaches memory of this GPU."""
    memory = torch.zeros(_REGION_BYTES, dtype=torch.uint8, device=gpu)
    try:
        engine = open_engine(gpu.index or 0)
        proxy = _open(name, exported(engine, _region_of(memory)), cuda_hooks(engine))
    except TransportError as error:
        return replace(trial, gpu_registration=str(error))
    found = replace(trial, gpu_registration=proxy.registration, counts=proxy.counts)
    proxy.close(0)
    return found
