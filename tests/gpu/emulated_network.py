"""The emulated network between two GPUs: does it sustain its bandwidth, are all bytes there? Prints a JSON line each.

    python tests/gpu/emulated_network.py [--gbps 50] [--chunk-kib 256] [--chunks 2000]

One process, two proxies, one for each GPU; commands come from the host. The time runs from the first command that a
proxy takes to its last completion, which comes with the last flag.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from dataclasses import dataclass

import torch

from mkcompile.runtime.proxy import Command, Link, Place, Proxy, ProxyConfig, Region, Ring
from mkcompile.runtime.proxy.cuda import CudaEngine, cuda_hooks, open_engine

FLAGS_BYTES = 1 << 16
LIMIT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What to send. Units: GB/s, microseconds, bytes."""

    bandwidth_gbps: float
    latency_us: float
    order: str
    chunk_bytes: int
    num_chunks: int
    is_two_way: bool


def regions(num_chunks: int, chunk_bytes: int) -> list[torch.Tensor]:
    size = FLAGS_BYTES + 2 * num_chunks * chunk_bytes
    made = [torch.zeros(size, dtype=torch.uint8, device=f"cuda:{rank}") for rank in range(2)]
    for rank, memory in enumerate(made):
        half = memory[FLAGS_BYTES : FLAGS_BYTES + num_chunks * chunk_bytes]
        half.copy_(torch.randint(0, 255, half.shape, dtype=torch.uint8, device=memory.device) ^ rank)
    made[0][:1].copy_(made[1][:1])  # torch turns on peer access in both directions
    made[1][:1].copy_(made[0][:1])
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    return made


def open_pair(run: Run, memories: list[torch.Tensor], engines: list[CudaEngine]) -> list[Proxy]:
    bases = tuple(memory.data_ptr() for memory in memories)
    link = Link(bandwidth_gbps=run.bandwidth_gbps, latency_us=run.latency_us, order=run.order, shuffle_us=20.0)
    config = ProxyConfig(transport="emulated", link=link, timeline_capacity=8 * run.num_chunks, ring_capacity=4096)
    proxies = []
    for rank, memory in enumerate(memories):
        region = Region(
            address=bases[rank],
            size_bytes=memory.numel(),
            flags_offset_bytes=0,
            num_flags=FLAGS_BYTES // 4,
            is_cuda=True,
            keep=memory,
        )
        place = Place(rank=rank, ranks=(0, 1), timeout_s=LIMIT_S)
        proxies.append(Proxy(place, region, config, cuda_hooks(engines[rank], bases), Ring()))
    for rank, proxy in enumerate(proxies):
        proxy.connect(1 - rank, proxies[1 - rank].endpoint(rank))
    for proxy in proxies:
        proxy.finish()
        proxy.start()
    return proxies


def send(proxy: Proxy, rank: int, run: Run) -> None:
    ticket = 0
    for number in range(run.num_chunks):
        source = FLAGS_BYTES + number * run.chunk_bytes
        command = Command(
            source_offset=source,
            destination_offset=source + run.num_chunks * run.chunk_bytes,
            bytes=run.chunk_bytes,
            peer=1 - rank,
            chunk=number,
            epoch=7,
        )
        ticket = proxy.push(command)
    proxy.wait_retired(ticket)


def measure(run: Run, engines: list[CudaEngine]) -> dict[str, object]:
    memories = regions(run.num_chunks, run.chunk_bytes)
    proxies = open_pair(run, memories, engines)
    senders = [threading.Thread(target=send, args=(proxies[rank], rank, run)) for rank in range(1 + run.is_two_way)]
    for one in senders:
        one.start()
    for one in senders:
        one.join()
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    rates, wrong = [], 0
    for rank in range(1 + run.is_two_way):
        events, _ = proxies[rank].timeline()
        taken = min(event.time_ns for event in events if event.kind == "taken")
        done = max(event.time_ns for event in events if event.kind == "completed")
        rates.append(round(run.num_chunks * run.chunk_bytes / (done - taken), 2))
        half = run.num_chunks * run.chunk_bytes
        sent = memories[rank][FLAGS_BYTES : FLAGS_BYTES + half].cpu()
        came = memories[1 - rank][FLAGS_BYTES + half :].cpu()
        flags = memories[1 - rank][:FLAGS_BYTES].view(torch.int32)[: run.num_chunks].cpu()
        wrong += int((sent != came).sum()) + int((flags != 7).sum())
    counters = proxies[0].counters()
    for proxy in proxies:
        proxy.close()
    return {
        "asked_gbps": run.bandwidth_gbps,
        "order": run.order,
        "two_way": run.is_two_way,
        "chunk_kib": run.chunk_bytes >> 10,
        "measured_gbps": rates,
        "wrong": wrong,
        "batches": counters["batches"],
        "commands": counters["commands"],
    }


def main() -> None:
    """All forms; exit status 1 where bytes or flags are wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gbps", type=float, default=50.0)
    parser.add_argument("--chunk-kib", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--chunks", type=int, default=1000)
    args = parser.parse_args()
    engines = [open_engine(device_idx) for device_idx in range(2)]
    status = 0
    for chunk_kib in args.chunk_kib:
        for order in ("in_order", "shuffled"):
            for gbps, is_two_way in ((args.gbps, False), (args.gbps, True), (0.0, False)):
                run = Run(
                    bandwidth_gbps=gbps,
                    latency_us=5.0,
                    order=order,
                    chunk_bytes=chunk_kib << 10,
                    num_chunks=args.chunks,
                    is_two_way=is_two_way,
                )
                started = time.monotonic()
                row = measure(run, engines)
                status |= int(row["wrong"] != 0)
                sys.stdout.write(json.dumps({**row, "took_s": round(time.monotonic() - started, 2)}) + "\n")
                sys.stdout.flush()
    sys.exit(status)


if __name__ == "__main__":
    main()
