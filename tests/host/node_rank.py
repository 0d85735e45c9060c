"""One rank in a network namespace of its own: `python -m tests.host.node_rank RANK FOLDER`, a JSON line on stdout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mkcompile.errors import TransportError
from mkcompile.runtime.proxy import ProxyConfig
from tests.host import traffic

MESSAGES = 40
LIMIT_S = 4.0


def run(rank: int, link: str) -> dict[str, Any]:
    proxy, side = traffic.join(ProxyConfig(transport="tcp", lanes=2, idle_spin_us=50), timeout_s=20)
    right = traffic.exchange(proxy, side, MESSAGES)
    device = proxy.device
    dist.barrier()
    proxy.close()
    proxy, side = traffic.join(ProxyConfig(transport="tcp", idle_spin_us=50), timeout_s=LIMIT_S)
    traffic.exchange(proxy, side, 2)
    dist.barrier()
    started = time.monotonic()
    if rank == 0:
        subprocess.run(["ip", "link", "set", link, "down"], check=True)
    error = ""
    try:
        traffic.exchange(proxy, side, 1000, first=2)
    except TransportError as caught:
        error = f"{type(caught).__name__} of peer {caught.report.peer}"
    return {"right": right, "device": device, "error": error, "took_s": time.monotonic() - started}


def main() -> None:
    """Join, exchange, lose the link."""
    rank, folder, link = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    sys.stdout.write(json.dumps(run(rank, link)) + "\n")
    sys.stdout.flush()
    # the link is gone, and with it the group: nothing to take leave of
    os._exit(0)


if __name__ == "__main__":
    main()
