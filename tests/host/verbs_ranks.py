"""Two ranks in one process over a stand-in for libibverbs, whose path is the argument: failures as Python sees them.

Prints a JSON object: for each case what was raised, twice where two calls were made, and whether the process goes on.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from mkcompile.errors import MkcompileError, TransportError
from mkcompile.runtime.proxy import Command, Hooks, Place, Proxy, ProxyConfig, Region, Ring
from mkcompile.runtime.proxy.trial import try_transport

SIZE, FLAGS, LIMIT_S = 1 << 16, 64, 5.0
Raised = dict[str, Any]


def open_one(rank: int, memory: torch.Tensor, is_cuda: bool = False, **config: Any) -> Proxy:
    region = Region(
        address=memory.data_ptr(),
        size_bytes=SIZE,
        flags_offset_bytes=0,
        num_flags=FLAGS,
        is_cuda=is_cuda,
        keep=memory,
    )
    settings = ProxyConfig(**{"transport": "rc", "device": f"nic{rank}", **config})
    return Proxy(Place(rank=rank, ranks=(4, 7), timeout_s=LIMIT_S), region, settings, Hooks(), Ring())


def pair(**config: Any) -> tuple[list[Proxy], list[torch.Tensor]]:
    memories = [torch.zeros(SIZE, dtype=torch.uint8) for _ in range(2)]
    proxies = [open_one(rank, memory, **config) for rank, memory in enumerate(memories)]
    for rank, proxy in enumerate(proxies):
        proxy.connect(1 - rank, proxies[1 - rank].endpoint(rank))
    for proxy in proxies:
        proxy.finish()
        proxy.start()
    return proxies, memories


def raised(call: Callable[[], object]) -> Raised:
    try:
        call()
    except MkcompileError as error:
        report = error.report if isinstance(error, TransportError) else None
        found = {"type": type(error).__name__, "text": str(error)}
        if report is not None:
            found |= {"call": report.call, "device": report.device, "peer": report.peer, "errno": report.errno}
        return found
    return {"type": "nothing"}


def works(**config: Any) -> dict[str, Any]:
    """A message each way, and what the proxy says of itself."""
    proxies, memories = pair(**config)
    for rank, proxy in enumerate(proxies):
        memories[rank][4096:8192] = rank + 1
        proxy.push(Command(source_offset=4096, destination_offset=8192, bytes=4096, peer=1 - rank, chunk=1, epoch=9))
    for rank, proxy in enumerate(proxies):
        proxy.wait(chunk=1, epoch=9, peer=1 - rank)
    right = all(bool((memories[rank][8192:12288] == 2 - rank).all()) for rank in range(2))
    facts = {"right": right, "registration": proxies[0].registration, "counts": proxies[0].counts}
    for proxy in proxies:
        proxy.close()
    return facts


def failing(break_it: Callable[[], None]) -> list[Raised]:
    """What the calls after a failure raise."""
    proxies, _ = pair()
    break_it()
    ticket = proxies[0].push(Command(peer=1, chunk=0, epoch=1, bytes=64))
    first = raised(lambda: proxies[0].wait_retired(ticket))
    return [first, raised(proxies[0].check), raised(lambda: proxies[0].push(Command(peer=1)))]


def refused(standin: ctypes.CDLL) -> Raised:
    memory = torch.zeros(SIZE, dtype=torch.uint8)
    standin.standin_refuse(ctypes.c_uint64(memory.data_ptr()), ctypes.c_uint64(SIZE), 14)
    return raised(lambda: open_one(0, memory, is_cuda=True))


def main() -> None:
    standin = ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
    seen: dict[str, Any] = {}

    def case(name: str, run: Callable[[], object]) -> None:
        standin.standin_plug_in(b"nic0", b"nic1")
        seen[name] = run()

    case("works", works)
    case("bounced", lambda: works(bounces=True))
    case("unordered", lambda: works(transport="unordered"))
    case("killed", lambda: failing(lambda: standin.standin_kill(b"nic1")))
    case("unplugged", lambda: failing(lambda: standin.standin_unplug(b"nic0")))
    case("refused", lambda: refused(standin))
    case("no device", lambda: raised(lambda: open_one(0, torch.zeros(SIZE, dtype=torch.uint8), device="nic5")))
    case("no port", lambda: raised(lambda: open_one(0, torch.zeros(SIZE, dtype=torch.uint8), device="nic0/x")))
    case("trial", lambda: str(try_transport("rc")))
    case("works after all", works)
    sys.stdout.write(json.dumps(seen) + "\n")


if __name__ == "__main__":
    main()
