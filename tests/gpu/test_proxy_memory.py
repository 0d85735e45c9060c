"""The host proxy on a GPU's memory: exported for NICs, and behind a bounce buffer that the GPU copies to and from."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mkcompile.errors import NoDeviceError
from mkcompile.runtime.proxy import Command, Place, Proxy, ProxyConfig, Region, Ring
from mkcompile.runtime.proxy.cuda import cuda_hooks, export, exported, open_engine

FLAGS_BYTES, SLOT_BYTES, SLOTS = 4096, 1 << 18, 8
SLICES_BYTES = 1 << 18  # half for what leaves, half for what comes
SIZE_BYTES = FLAGS_BYTES + 2 * SLOTS * SLOT_BYTES
LIMIT_S = 20.0


def region_of(memory: torch.Tensor) -> Region:
    return Region(
        address=memory.data_ptr(),
        size_bytes=memory.numel(),
        flags_offset_bytes=0,
        num_flags=FLAGS_BYTES // 4,
        is_cuda=True,
        keep=memory,
    )


def test_memory_is_exported_as_a_dma_buf() -> None:
    engine = open_engine(0)
    memory = torch.zeros(3 << 20, dtype=torch.uint8, device="cuda:0")
    try:
        inside = export(engine, memory.data_ptr() + 512, 1 << 20)
    except NoDeviceError as error:
        pytest.skip(str(error))
    assert inside.offset_bytes >= 512
    assert "dmabuf" in os.readlink(f"/proc/self/fd/{inside.descriptor}")
    assert exported(engine, region_of(memory)).dmabuf >= 0
    assert engine.write_order in ("in order", "flushed")


def test_the_context_of_the_caller_stays_as_it_was() -> None:
    device = torch.cuda.device_count() - 1
    with torch.cuda.device(device):
        engine = open_engine(0)
        assert torch.cuda.current_device() == device
        del engine
        assert torch.cuda.current_device() == device and torch.zeros(1, device="cuda").device.index == device


@pytest.mark.parametrize("bounces", [True, False])
def test_bytes_are_in_place_before_their_flags(bounces: bool) -> None:
    """Two ranks over sockets, on two GPUs where there are two: through a double of the region, and through slices that
    are smaller than most messages. Messages of random size are checked whole.
    """
    devices = [rank % torch.cuda.device_count() for rank in range(2)]
    memories = [torch.zeros(SIZE_BYTES, dtype=torch.uint8, device=f"cuda:{device}") for device in devices]
    slices = [torch.zeros(SLICES_BYTES, dtype=torch.uint8).pin_memory() for _ in devices]
    proxies = []
    for rank, device in enumerate(devices):
        config = ProxyConfig(transport="tcp", device="lo", bounces=bounces)
        place = Place(rank=rank, ranks=(0, 1), timeout_s=LIMIT_S)
        hooks = cuda_hooks(open_engine(device), bounce_base=slices[rank].data_ptr(), bounce_bytes=SLICES_BYTES)
        proxies.append(Proxy(place, region_of(memories[rank]), config, hooks, Ring()))
    assert [proxy.registration for proxy in proxies] == ["bounce buffer"] * 2
    for rank, proxy in enumerate(proxies):
        proxy.connect(1 - rank, proxies[1 - rank].endpoint(rank))
    finish_all(proxies)
    for epoch in range(1, 21):
        for rank, proxy in enumerate(proxies):
            send_all(proxy, memories[rank], 1 - rank, epoch)
        for rank, memory in enumerate(memories):
            check_all(memory, 1 - rank, epoch)
    for proxy in proxies:
        proxy.check()
        proxy.close(1.0)


def finish_all(proxies: list[Proxy]) -> None:
    """Connecting takes both sides at once."""
    with ThreadPoolExecutor(len(proxies)) as pool:
        list(pool.map(lambda proxy: proxy.finish(), proxies))
    for proxy in proxies:
        proxy.start()


def content(rank: int, slot: int, epoch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank * 1009 + slot * 31 + epoch)
    size = int(torch.randint(1, SLOT_BYTES, (1,), generator=generator))
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def send_all(proxy: Proxy, memory: torch.Tensor, peer: int, epoch: int) -> None:
    for slot in range(SLOTS):
        data, at = content(proxy.place.rank, slot, epoch), FLAGS_BYTES + (SLOTS + slot) * SLOT_BYTES
        memory[at : at + len(data)] = data.to(memory.device)
        torch.cuda.synchronize(memory.device)
        target = FLAGS_BYTES + slot * SLOT_BYTES
        command = Command(
            source_offset=at, destination_offset=target, bytes=len(data), peer=peer, chunk=slot, epoch=epoch
        )
        ticket = proxy.push(command)
    proxy.wait_retired(ticket)


def check_all(memory: torch.Tensor, sender: int, epoch: int) -> None:
    flags = memory[:FLAGS_BYTES].view(torch.int32)
    for slot in range(SLOTS):
        until = time.monotonic() + LIMIT_S
        while int(flags[slot]) < epoch:
            assert time.monotonic() < until, f"no flag {slot} of epoch {epoch}"
        expected, at = content(sender, slot, epoch), FLAGS_BYTES + slot * SLOT_BYTES
        assert torch.equal(memory[at : at + len(expected)].cpu(), expected)
