"""The binding in one process: mirrors, errors of every kind, counters and timeline of a running proxy."""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import gc
from pathlib import Path

import pytest
import torch

from mkcompile.errors import (
    MkcompileError,
    NoDeviceError,
    OptionError,
    PeerLostError,
    PeerTimeoutError,
    ProxyUnavailableError,
    RegistrationError,
    RingFullError,
    TransportError,
)
from mkcompile.runtime.proxy import Command, Hooks, Link, Place, Proxy, ProxyConfig, Region, Ring, abi
from mkcompile.runtime.proxy.failures import exception_of
from mkcompile.runtime.proxy.library import library, load, missing

SIZE = 1 << 16
FLAGS = 64
LIMIT_S = 20.0


def region_of(memory: torch.Tensor) -> Region:
    return Region(
        address=memory.data_ptr(), size_bytes=memory.numel(), flags_offset_bytes=0, num_flags=FLAGS, keep=memory
    )


def open_one(rank: int, memory: torch.Tensor, config: ProxyConfig, timeout_s: float = LIMIT_S) -> Proxy:
    return Proxy(Place(rank=rank, ranks=(4, 7), timeout_s=timeout_s), region_of(memory), config, Hooks(), Ring())


def emulated_pair(config: ProxyConfig, timeout_s: float = LIMIT_S) -> tuple[list[Proxy], list[torch.Tensor]]:
    memories = [torch.zeros(SIZE, dtype=torch.uint8) for _ in range(2)]
    proxies = [open_one(rank, memory, config, timeout_s) for rank, memory in enumerate(memories)]
    for rank, proxy in enumerate(proxies):
        proxy.connect(1 - rank, proxies[1 - rank].endpoint(rank))
    for proxy in proxies:
        proxy.finish()
        proxy.start()
    return proxies, memories


def test_the_mirrors_have_the_librarys_layout() -> None:
    count = ctypes.c_uint32()
    layouts = library().mk_layouts(ctypes.byref(count))
    assert abi.drifted(layouts[i] for i in range(count.value)) == []
    assert count.value > 50


def test_a_mirror_that_drifted_is_found() -> None:
    layouts = library().mk_layouts(ctypes.byref(count := ctypes.c_uint32()))
    kept = [layouts[i] for i in range(count.value)]
    moved = abi.Layout(structure=b"Command", field=b"epoch", offset=36, bytes=4)
    found = abi.drifted([moved if one.field == b"epoch" else one for one in kept if one.field != b"chunk"])
    assert any("Command.epoch" in line for line in found)
    assert "Command.chunk is not in the library" in found


def test_a_library_of_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProxyUnavailableError, match="another version"):
        load(Path(ctypes.util.find_library("c") or "libc.so.6"))
    broken = tmp_path / "libmkproxy.so"
    broken.write_text("not a library")
    with pytest.raises(ProxyUnavailableError, match="can't be loaded"):
        load(broken)


def test_transports_that_need_nothing_are_always_there() -> None:
    assert missing("tcp") == "" and missing("emulated") == ""


def test_bytes_arrive_with_their_flag_and_everything_is_counted() -> None:
    proxies, memories = emulated_pair(ProxyConfig(transport="emulated", link=Link(latency_us=5, bandwidth_gbps=10)))
    memories[0][4096:8192] = torch.arange(4096).to(torch.uint8)
    tickets = [
        proxies[0].push(Command(source_offset=4096, destination_offset=8192, bytes=4096, peer=1, chunk=3, epoch=epoch))
        for epoch in range(1, 6)
    ]
    assert tickets == list(range(5))
    assert proxies[1].wait(chunk=3, epoch=5, peer=0) == 5
    assert torch.equal(memories[1][8192:12288], memories[0][4096:8192])
    proxies[0].wait_retired(tickets[-1])
    counters = proxies[0].counters()
    assert (counters["commands"], counters["completions"], counters["bytes_sent"]) == (5, 5, 5 * 4096)
    events, following = proxies[0].timeline()
    assert following == len(events) == 15
    mine = [event for event in events if event.ticket == tickets[0]]
    assert [event.kind for event in mine] == ["taken", "posted", "completed"]
    assert all(event.peer == 1 and event.chunk == 3 and event.num_bytes == 4096 for event in mine)
    assert proxies[0].timeline(following) == ([], following)
    for proxy in proxies:
        proxy.close()


def test_a_flag_that_does_not_come_is_an_error_with_names() -> None:
    proxies, _ = emulated_pair(ProxyConfig(transport="emulated"))
    with pytest.raises(PeerTimeoutError) as caught:
        proxies[0].wait(chunk=9, epoch=4, peer=1, timeout_s=0.01)
    report = caught.value.report
    assert (report.rank, report.peer, report.tile, report.expected, report.seen) == (4, 7, 9, 4, 0)
    with pytest.raises(IndexError):
        proxies[0].wait(chunk=FLAGS, epoch=1)
    proxies[0].check()  # a late peer is not a failure of the proxy


def test_the_first_failure_is_raised_by_every_later_call() -> None:
    proxies, _ = emulated_pair(ProxyConfig(transport="emulated"))
    proxies[0].push(Command(source_offset=0, destination_offset=SIZE, bytes=8, peer=1, chunk=0, epoch=1))
    with pytest.raises(TransportError, match="command on emulated, peer 7: Invalid argument"):
        proxies[0].wait(chunk=0, epoch=1)
    for call in (proxies[0].check, lambda: proxies[0].wait_retired(0), lambda: proxies[0].push(Command(peer=1))):
        with pytest.raises(TransportError) as caught:
            call()
        report = caught.value.report
        assert (report.call, report.device, report.peer, report.errno) == ("command", "emulated", 7, errno.EINVAL)
    proxies[0].close()
    with pytest.raises(MkcompileError, match="closed"):
        proxies[0].check()


def test_a_full_ring_is_an_error_and_not_a_wait() -> None:
    # nothing leaves within the test: the link needs an hour for a message
    config = ProxyConfig(transport="emulated", ring_capacity=4, max_outstanding=2, link=Link(latency_us=3.6e9))
    proxies, _ = emulated_pair(config)
    for _ in range(4 + 2):
        proxies[0].push(Command(peer=1, epoch=1), timeout_s=LIMIT_S)
    with pytest.raises(RingFullError, match="all 4 slots"):
        proxies[0].push(Command(peer=1, epoch=1), timeout_s=0.01)
    with pytest.raises(TransportError, match="2 commands were dropped"):
        proxies[0].close(0.01)


def test_a_link_that_completes_nothing_is_a_lost_peer() -> None:
    proxies, _ = emulated_pair(ProxyConfig(transport="emulated", link=Link(latency_us=3.6e9)), timeout_s=0.05)
    proxies[0].push(Command(peer=1, epoch=1))
    with pytest.raises(PeerLostError, match="no completion"):
        proxies[0].wait_retired(0, timeout_s=LIMIT_S)


@pytest.mark.parametrize(
    ("call", "number", "peer", "kind"),
    [
        ("ibv_reg_mr", errno.EFAULT, -1, RegistrationError),
        ("ibv_poll_cq", errno.ETIMEDOUT, 1, PeerLostError),
        ("recv", errno.ECONNRESET, 0, PeerLostError),
        ("register_memory", errno.EINVAL, -1, RegistrationError),
        ("bounce buffer", errno.ENOMEM, -1, RegistrationError),
        ("rdma write", errno.ETIMEDOUT, 1, PeerLostError),
        ("rdma write", errno.ENETDOWN, 1, PeerLostError),
        ("rdma write", errno.ENOBUFS, 1, TransportError),
        ("post", errno.ENOTCONN, 1, PeerLostError),
        ("choose_nic", errno.ENODEV, -1, NoDeviceError),
        ("ibv_get_device_list", errno.ENOSYS, -1, NoDeviceError),
        ("ibv_poll_cq", errno.EIO, 1, TransportError),
    ],
)
def test_each_failure_has_its_type(call: str, number: int, peer: int, kind: type[TransportError]) -> None:
    error = exception_of(abi.Error(number=number, peer=peer, call=call.encode(), device=b"rxe0"), (10, 11))
    assert type(error) is kind
    assert error.report.peer == {-1: -1, 0: 10, 1: 11}[peer]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"transport": "pigeon"}, "emulated, tcp"),
        ({"lanes": 0}, "at least 1"),
        ({"device": "x" * 70}, "too long"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        ProxyConfig(**options)  # type: ignore[arg-type]
    with pytest.raises(OptionError):
        Link(latency_us=-1)


def test_what_the_library_refuses_is_typed() -> None:
    memory = torch.zeros(SIZE, dtype=torch.uint8)
    with pytest.raises(NoDeviceError, match="no-such0"):
        open_one(0, memory, ProxyConfig(transport="tcp", device="no-such0"))
    with pytest.raises(OptionError, match="with_nic"):
        open_one(0, memory, ProxyConfig(transport="rc", device="mlx5_0,mlx5_1"))
    with pytest.raises(TransportError, match="1 to 64 connections"):
        open_one(0, memory, ProxyConfig(transport="tcp", lanes=65))


def test_a_proxy_that_is_forgotten_ends() -> None:
    gc.collect()
    before = num_threads()
    proxies, _ = emulated_pair(ProxyConfig(transport="emulated"))
    assert num_threads() == before + 2
    del proxies
    gc.collect()
    assert num_threads() <= before


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))
