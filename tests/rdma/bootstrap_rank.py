"""A rank in each of two virtual machines: proxies that meet through the process group's store, and what they raise.

Begins when its input has a line: importing torch takes half a minute there. Prints a line that begins with `ok` for
each thing seen. Rank 1 kills itself at the end.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch.distributed as dist

from mkcompile.errors import PeerLostError
from mkcompile.runtime.proxy import ProxyConfig, choose_transport
from tests.host import traffic

MEETING_PLACE = "tcp://10.78.0.1:7100"
MESSAGES = 40
SOON_S = 20.0


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def exchange(config: ProxyConfig) -> None:
    proxy, side = traffic.join(config, timeout_s=SOON_S)
    assert traffic.exchange(proxy, side, MESSAGES) == MESSAGES
    dist.barrier()
    proxy.close()
    say(f"ok bootstrap/{config.transport}/proxies_meet_through_the_store")


def lose_a_peer(config: ProxyConfig) -> None:
    proxy, side = traffic.join(config, timeout_s=SOON_S)
    traffic.exchange(proxy, side, 3)
    dist.barrier()
    if dist.get_rank() == 1:
        say(f"ok bootstrap/{config.transport}/a_killed_peer_is_named")
        os.kill(os.getpid(), signal.SIGKILL)
    started_s = time.monotonic()
    try:
        while True:
            traffic.send(proxy, side, 1, 3)
            proxy.check()
    except PeerLostError as error:
        report = error.report
        assert (report.call, report.peer) == ("rdma write", 1) and report.device.startswith("rxe2/1"), report
        assert report.errno != 0 and time.monotonic() - started_s < SOON_S, report
        say(f"  {error}")
    proxy.close()
    say(f"ok bootstrap/{config.transport}/a_killed_peer_is_named")


def main() -> None:
    rank = int(os.environ["VM_RANK"])
    sys.stdin.readline()
    dist.init_process_group("gloo", init_method=MEETING_PLACE, rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    chosen, why_not = choose_transport(group)
    assert chosen == "rc" and "srd" in why_not, (chosen, why_not)
    say("ok bootstrap/rc/it_is_chosen_where_all_have_it")
    for transport in ("unordered", "rc"):
        exchange(ProxyConfig(transport=transport, device="rxe2", lanes=2))
    lose_a_peer(ProxyConfig(transport="rc", device="rxe2"))


if __name__ == "__main__":
    main()
