"""Proxies of several processes over sockets: traffic, and everything that can go wrong between them."""

from __future__ import annotations

import errno
import os
import signal
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mkcompile.errors import (
    MkcompileError,
    PeerLostError,
    PeerTimeoutError,
    ProxyUnavailableError,
    TransportError,
    TransportReport,
)
from mkcompile.runtime.proxy import Proxy, ProxyConfig, choose_transport, configured
from tests.host import traffic
from tests.spawn import Outcomes, run_cases

WORLD_SIZE = 3
MESSAGES = 60
TCP = ProxyConfig(transport="tcp", lanes=2, idle_spin_us=50)


def group_works() -> bool:
    """The process goes on: its group still reduces."""
    ones = torch.ones(4)
    dist.all_reduce(ones)
    return bool((ones == dist.get_world_size()).all())


def traffic_case(rank: int, world_size: int) -> dict[str, Any]:
    proxy, side = traffic.join(TCP)
    right = traffic.exchange(proxy, side, MESSAGES)
    counters = proxy.counters()
    dist.barrier()
    proxy.close()
    return {"right": right, "device": proxy.place.rank, "counters": counters}


def chosen_case(rank: int, world_size: int) -> tuple[str, str, str]:
    group = dist.group.WORLD
    assert group is not None
    by_setting = configured(group, "tcp:lo", TCP)
    return choose_transport(group)[0], configured(group, "auto", TCP).transport, by_setting.device


def no_device_case(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 1 names an interface that it does not have: all give up at once, then all go on."""
    config = ProxyConfig(transport="tcp", device="no-such0") if rank == 1 else TCP
    with pytest.raises(MkcompileError) as caught:
        traffic.join(config)
    proxy, side = traffic.join(TCP)
    right = traffic.exchange(proxy, side, 5)
    dist.barrier()
    proxy.close()
    return {"kind": type(caught.value).__name__, "text": str(caught.value), "right": right}


def no_thread_case(rank: int, world_size: int) -> str:
    """Rank 1's proxy does not start: the others, whose proxies run, hear of it."""
    report = TransportReport(call="pthread_create", device="", peer=-1, errno=errno.EAGAIN, detail="")
    failing = {"side_effect": TransportError(report)} if rank == 1 else {"wraps": Proxy.start}
    with mock.patch.object(Proxy, "start", autospec=True, **failing), pytest.raises(MkcompileError) as caught:
        traffic.join(TCP)
    return str(caught.value)


def mismatch_case(rank: int, world_size: int) -> str:
    config = ProxyConfig(transport="tcp", lanes=1 + rank)
    with pytest.raises(TransportError) as caught:
        traffic.join(config)
    return str(caught.value)


def absent_case(rank: int, world_size: int) -> tuple[float, str]:
    """Rank 2 does not come."""
    started = time.monotonic()
    text = ""
    if rank != 2:
        with pytest.raises(PeerTimeoutError) as caught:
            traffic.join(TCP, timeout_s=1.0)
        text = str(caught.value)
    took_s = time.monotonic() - started
    dist.barrier()
    return took_s, text


def stopped_case(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 1 says goodbye: nobody takes that for a loss; what is sent to it afterwards is one."""
    proxy, side = traffic.join(TCP, timeout_s=10)
    traffic.exchange(proxy, side, 3)
    dist.barrier()
    if rank == 1:
        proxy.close()
    dist.barrier()
    error = None
    if rank != 1:
        proxy.check()
        with pytest.raises(PeerLostError) as caught:
            while True:
                traffic.send(proxy, side, 1, 3)
                proxy.check()
        error = (caught.value.report.peer, caught.value.report.device)
    dist.barrier()
    return {"error": error, "works": group_works()}


def killed_case(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 1 is killed in the midst of traffic; the last case, since it leaves no rank 1."""
    proxy, side = traffic.join(TCP, timeout_s=10)
    traffic.exchange(proxy, side, 3)
    dist.barrier()  # nobody is in the first exchange any more
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        traffic.exchange(proxy, side, 1000, first=3)
    took_s = time.monotonic() - started
    with pytest.raises(PeerLostError):
        proxy.check()
    proxy.close()
    report = caught.value.report
    works = bool(torch.equal(torch.eye(3) @ torch.ones(3, 2), torch.ones(3, 2)))
    return {"took_s": took_s, "peer": report.peer, "device": report.device, "works": works}


CASES = {
    "traffic": traffic_case,
    "chosen": chosen_case,
    "no device": no_device_case,
    "no thread": no_thread_case,
    "mismatch": mismatch_case,
    "absent": absent_case,
    "stopped": stopped_case,
    "killed": killed_case,
}


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return run_cases(CASES, WORLD_SIZE, group_timeout_s=60)


def test_all_bytes_are_right_in_every_direction(outcomes: Outcomes) -> None:
    for seen in outcomes.values("traffic"):
        assert seen["right"] == MESSAGES * (WORLD_SIZE - 1)
        # the last credits may still be on their way
        least = (2 * MESSAGES - 1) * (WORLD_SIZE - 1)
        assert least <= seen["counters"]["arrivals"] <= 2 * MESSAGES * (WORLD_SIZE - 1)
        assert seen["counters"]["batches"] >= seen["counters"]["partial_batches"] > 0


def test_the_transport_is_chosen_alike_or_set(outcomes: Outcomes) -> None:
    chosen = outcomes.values("chosen")
    assert len(set(chosen)) == 1 and chosen[0][0] == chosen[0][1] and chosen[0][2] == "lo"


def test_where_one_rank_has_no_device_all_give_up_together_and_go_on(outcomes: Outcomes) -> None:
    seen = outcomes.values("no device")
    assert [one["kind"] for one in seen] == [ProxyUnavailableError.__name__, "NoDeviceError", "ProxyUnavailableError"]
    assert all("no-such0" in one["text"] for one in seen) and "rank 1" in seen[0]["text"]
    assert all(one["right"] == 5 * (WORLD_SIZE - 1) for one in seen)


def test_a_rank_whose_proxy_does_not_start_is_named_everywhere(outcomes: Outcomes) -> None:
    seen = outcomes.values("no thread")
    assert all("pthread_create" in text for text in seen) and all("rank 1" in seen[rank] for rank in (0, 2))


def test_ranks_with_different_settings_say_which(outcomes: Outcomes) -> None:
    assert all("2 connections" in text or "1 connections" in text for text in outcomes.values("mismatch"))


def test_a_rank_that_does_not_come_is_named_within_the_deadline(outcomes: Outcomes) -> None:
    for took_s, text in outcomes.values("absent")[:2]:
        assert took_s < 10 and "rank 2" in text


def test_a_goodbye_is_no_loss(outcomes: Outcomes) -> None:
    for rank, seen in enumerate(outcomes.values("stopped")):
        assert seen["works"]
        assert seen["error"] == (None if rank == 1 else (1, "lo"))


def test_a_killed_peer_is_named_at_once_and_the_process_goes_on(outcomes: Outcomes) -> None:
    results = outcomes.by_case["killed"]
    peers = set()
    for rank in (0, 2):
        assert results[rank].error is None, results[rank].error
        seen = results[rank].value
        assert seen["took_s"] < 8 and seen["device"] == "lo" and seen["works"]
        peers.add(seen["peer"])
    # whoever notices second may see the first survivor go
    assert 1 in peers
