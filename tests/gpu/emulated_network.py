"""The emulated network between two GPUs: does it sustain its bandwidth, are all bytes there? Prints a JSON line each.

    python tests/gpu/emulated_network.py [--gbps 50] [--chunk-kib 64 256] [--mib 64]

One process, two proxies, one for each GPU; commands come from the host. The time runs from the first command that a
proxy takes to its last completion, which comes with the last flag. Exit status 1 where bytes or flags are wrong, 2
where the network is slower than 0.97 of what was asked.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from mkcompile.runtime.proxy import Command, Link, Place, Proxy, ProxyConfig, Region, Ring
from mkcompile.runtime.proxy.cuda import CudaEngine, cuda_hooks, open_engine
from mkcompile.runtime.proxy.settings import Order

FLAGS_BYTES = 1 << 16
LIMIT_S = 20.0
ORDERS: tuple[Order, ...] = ("in_order", "shuffled")
_LONE_MESSAGES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What to send. Units: GB/s, microseconds, bytes. `apart`: chunks do not adjoin in the destination."""

    bandwidth_gbps: float
    latency_us: float
    order: Order
    chunk_bytes: int
    num_chunks: int
    is_two_way: bool = False
    apart: bool = False
    lone: bool = False

    @property
    def bytes(self) -> int:
        return self.num_chunks * self.chunk_bytes

    def places(self, number: int) -> tuple[int, int]:
        """Where a chunk lies at its source and at its destination, in the halves of the regions."""
        target = (number * 7 + 3) % self.num_chunks if self.apart else number
        return number * self.chunk_bytes, target * self.chunk_bytes


@dataclass(slots=True)
class Pair:
    """Two GPUs, a region on each: flags, what is sent, what comes."""

    half_bytes: int
    memories: list[torch.Tensor]
    engines: list[CudaEngine]

    @staticmethod
    def open(half_bytes: int) -> Pair:
        size = FLAGS_BYTES + 2 * half_bytes
        memories = [torch.zeros(size, dtype=torch.uint8, device=f"cuda:{rank}") for rank in range(2)]
        for rank, memory in enumerate(memories):
            generator = torch.Generator(device=memory.device).manual_seed(rank + 1)
            memory[FLAGS_BYTES : FLAGS_BYTES + half_bytes].random_(0, 255, generator=generator)
        memories[0][:1].copy_(memories[1][:1])  # torch turns on peer access in both directions
        memories[1][:1].copy_(memories[0][:1])
        return Pair(half_bytes, memories, [open_engine(rank) for rank in range(2)])

    def clear(self) -> None:
        for memory in self.memories:
            memory[:FLAGS_BYTES].zero_()
            memory[FLAGS_BYTES + self.half_bytes :].fill_(0xEE)
        self.settle()

    def settle(self) -> None:
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)

    def sent(self, rank: int, start: int, num_bytes: int) -> torch.Tensor:
        return self.memories[rank][FLAGS_BYTES + start :][:num_bytes]

    def came(self, rank: int, start: int, num_bytes: int) -> torch.Tensor:
        return self.memories[rank][FLAGS_BYTES + self.half_bytes + start :][:num_bytes]


def open_proxies(run: Run, pair: Pair) -> list[Proxy]:
    bases = tuple(memory.data_ptr() for memory in pair.memories)
    link = Link(bandwidth_gbps=run.bandwidth_gbps, latency_us=run.latency_us, order=run.order, shuffle_us=20.0)
    config = ProxyConfig(
        transport="emulated", link=link, timeline_capacity=8 * run.num_chunks, ring_capacity=4096,
        idle_spin_us=1e6,
    )  # fmt: skip
    proxies = []
    for rank, memory in enumerate(pair.memories):
        region = Region(
            address=bases[rank], size_bytes=memory.numel(), flags_offset_bytes=0, num_flags=FLAGS_BYTES // 4,
            is_cuda=True, keep=memory,
        )  # fmt: skip
        place = Place(rank=rank, ranks=(0, 1), timeout_s=LIMIT_S)
        proxies.append(Proxy(place, region, config, cuda_hooks(pair.engines[rank], bases), Ring()))
    for rank, proxy in enumerate(proxies):
        proxy.connect(1 - rank, proxies[1 - rank].endpoint(rank))
    for proxy in proxies:
        proxy.finish()
    return proxies


def start(proxies: list[Proxy]) -> None:
    for proxy in proxies:
        proxy.start()


def push_all(proxy: Proxy, rank: int, run: Run, pair: Pair) -> int:
    """The ring has room for all. The ticket of the last."""
    ticket = 0
    for number in range(run.num_chunks):
        source, target = run.places(number)
        command = Command(
            source_offset=FLAGS_BYTES + source,
            destination_offset=FLAGS_BYTES + pair.half_bytes + target,
            bytes=run.chunk_bytes,
            peer=1 - rank,
            chunk=number,
            epoch=7,
        )
        ticket = proxy.push(command)
        if run.lone:
            proxy.wait_retired(ticket)
    return ticket


def wrong_bytes(run: Run, pair: Pair, rank: int) -> int:
    """Bytes and flags that are not what `rank` sent."""
    wrong = 0
    for number in range(run.num_chunks):
        source, target = run.places(number)
        came = pair.came(1 - rank, target, run.chunk_bytes).to(f"cuda:{rank}")
        wrong += int(not torch.equal(came, pair.sent(rank, source, run.chunk_bytes)))
    flags = pair.memories[1 - rank][:FLAGS_BYTES].view(torch.int32)[: run.num_chunks]
    return wrong + int((flags != 7).sum())


def measure(run: Run, pair: Pair) -> dict[str, Any]:
    pair.clear()
    proxies = open_proxies(run, pair)
    ranks = range(1 + run.is_two_way)
    if run.lone:
        start(proxies)
    # Python takes longer for a command than the link for a small chunk: they are all there when the proxies start
    last = [push_all(proxies[rank], rank, run, pair) for rank in ranks]
    if not run.lone:
        start(proxies)
    for rank in ranks:
        proxies[rank].wait_retired(last[rank])
    pair.settle()
    rates, latencies_us = [], []
    for rank in ranks:
        events, _ = proxies[rank].timeline()
        taken = {event.ticket: event.time_ns for event in events if event.kind == "taken"}
        done = {event.ticket: event.time_ns for event in events if event.kind == "completed"}
        rates.append(round(run.bytes / (max(done.values()) - min(taken.values())), 2))
        latencies_us += [(done[ticket] - taken[ticket]) / 1e3 for ticket in taken]
    counters = proxies[0].counters()
    for proxy in proxies:
        proxy.close()
    row: dict[str, Any] = {
        "asked_gbps": run.bandwidth_gbps, "order": run.order, "two_way": run.is_two_way, "apart": run.apart,
        "lone": run.lone, "chunk_kib": run.chunk_bytes >> 10, "measured_gbps": rates,
        "wrong": sum(wrong_bytes(run, pair, rank) for rank in ranks),
        "batches": counters["batches"], "commands": counters["commands"],
    }  # fmt: skip
    if run.lone:
        row["latency_us"] = round(sorted(latencies_us)[len(latencies_us) // 2], 1)
    return row


def runs(args: argparse.Namespace) -> list[Run]:
    made = []
    for chunk_kib in args.chunk_kib:
        chunk_bytes = chunk_kib << 10
        base = Run(
            bandwidth_gbps=args.gbps, latency_us=5.0, order="in_order", chunk_bytes=chunk_bytes,
            num_chunks=(args.mib << 20) // chunk_bytes, is_two_way=True,
        )  # fmt: skip
        made += [replace(base, order=order, apart=apart) for order in ORDERS for apart in (False, True)]
        made += [replace(base, is_two_way=False), replace(base, bandwidth_gbps=0.0)]
        made.append(replace(base, is_two_way=False, lone=True, num_chunks=min(_LONE_MESSAGES, base.num_chunks)))
    return made


def main() -> None:
    """All forms."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gbps", type=float, default=50.0)
    parser.add_argument("--chunk-kib", type=int, nargs="+", default=[64, 128, 256, 512, 1024, 2048])
    parser.add_argument("--mib", type=int, default=64, help="bytes that each side sends")
    args = parser.parse_args()
    pair = Pair.open(args.mib << 20)
    everything = runs(args)
    measure(everything[0], pair)  # the links wake up
    status = 0
    for run in everything:
        started = time.monotonic()
        row = measure(run, pair)
        if row["wrong"]:
            status = 1
        elif not run.lone and run.bandwidth_gbps and min(row["measured_gbps"]) < 0.97 * run.bandwidth_gbps:
            status = status or 2
        sys.stdout.write(json.dumps({**row, "took_s": round(time.monotonic() - started, 2)}) + "\n")
        sys.stdout.flush()
    sys.exit(status)


if __name__ == "__main__":
    main()
