"""Launches behind one another over several nodes, again and again; of a round that fails, what every proxy did.

    python -m tests.gpu.network_stress --out FILE [--seconds 50] [--only NAME ...]

Each case has a process of its own, since the number of the device's queues is read when CUDA is initialised. Prints and
writes a JSON line a case. Ranks share one GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from mkcompile.errors import MkcompileError
from mkcompile.runtime.gather_launch import GatherSize
from mkcompile.runtime.kernel_config import KernelConfig

from .network_gather_calls import Movers, config_of, make_call
from .network_ranks import FAST, SLOW_SHUFFLED, NodeGroup
from .ranks import nan_outputs, random_input
from .test_reductions import expected_of
from .truth import assert_bitwise, summed

_LINKS = {"fast": FAST, "slow": SLOW_SHUFFLED}
_BEHIND = 4
_TIMEOUT_S = 1.0
_START_S = 40.0
_MOST_FAILURES = 4
_SLOW_NS = 50_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`queues` of the device for all streams; `grid`: blocks of a gather's kernel on each rank, 0: as many as fit."""

    nodes: int
    local: int
    link: str = "fast"
    operators: tuple[str, ...] = ("gather",)
    queues: int = 32
    grid: int = 0

    @property
    def name(self) -> str:
        """As it is asked for."""
        kinds = "+".join(self.operators)
        return f"{self.nodes}x{self.local}-{self.link}-{kinds}-q{self.queues}{f'-g{self.grid}' if self.grid else ''}"


CASES = (
    Case(nodes=4, local=1),
    Case(nodes=2, local=2, link="slow"),
    Case(nodes=2, local=4),
    Case(nodes=2, local=2, link="slow", operators=("gather", "reduce_scatter", "all_reduce")),
    Case(nodes=2, local=1, queues=8),
    Case(nodes=2, local=4, operators=("reduce_scatter", "all_reduce")),
    Case(nodes=2, local=4, queues=8),
    Case(nodes=2, local=1, queues=2),
)


@dataclass(slots=True, kw_only=True)
class Work:
    """What one call of a round runs, and how its results are checked. `keep`: what launches read, by address alone."""

    run: Callable[[], None]
    check: Callable[[], None]
    keep: object = None


@dataclass(slots=True)
class Stress:
    """One case on one group of ranks; a group that has failed is made anew."""

    case: Case
    group: NodeGroup = field(init=False)
    works: list[Work] = field(init=False)
    failures: list[dict[str, Any]] = field(default_factory=list)
    rounds: int = 0

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        """A new group, and the calls of a round."""
        case = self.case
        devices = (0,) * (case.nodes * case.local)
        self.group = NodeGroup(
            devices, nodes=case.nodes, link=_LINKS[case.link], arena_bytes=96 << 20, timeline_capacity=4096
        )
        self.group.timeout_s = _TIMEOUT_S
        movers = Movers.of(self.group)
        if case.grid:
            movers = Movers(devices=movers.devices, grid=case.grid, threads=movers.threads)
        kinds = [case.operators[i % len(case.operators)] for i in range(_BEHIND)]
        self.works = [
            gather_work(self.group, movers, i) if kind == "gather" else reduce_work(self.group, kind, i)
            for i, kind in enumerate(kinds)
        ]
        self.group.synchronize()

    def round(self, check: bool) -> None:
        """All calls behind one another; a failure is kept with what the proxies know of it."""
        self.rounds += 1
        for i, work in enumerate(self.works):
            if self.rounds % 3 == 0:
                self.group.delay((self.rounds + i) % self.group.world, 400_000)
            work.run()
        self.group.synchronize()
        try:
            self.group.check()
            if check:
                for work in self.works:
                    work.check()
        except (MkcompileError, AssertionError) as error:
            self.failures.append({"round": self.rounds, "error": str(error)[:600], **evidence(self.group)})
            for proxy in self.group.proxies:
                proxy.close(0.5)
            self.open()

    def run_for(self, seconds: float) -> None:
        """Until the time is up or enough has failed. Results are checked in every eighth round."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s and len(self.failures) < _MOST_FAILURES:
            self.round(check=self.rounds % 8 == 0)
        for proxy in self.group.proxies:
            proxy.close(0.5)


def gather_work(group: NodeGroup, movers: Movers, seed: int) -> Work:
    """An all-gather of exact numbers in several messages a shard."""
    size = GatherSize(segment_rows=(256, 500, 128, 333)[seed % 4], k=264, n=(264,), world=group.world)
    call = make_call(
        group,
        movers,
        config_of(group, (128, 128)),
        size,
        seed=seed,
        integers=True,
        returned=seed % 2 == 1,
        group_rows=64,
    )
    return Work(run=lambda: call.run(group), check=lambda: call.check(exact=True, what=f"gather {seed}"))


def reduce_work(group: NodeGroup, kind: str, seed: int) -> Work:
    """A reduce-scatter or all-reduce of exact numbers."""
    broadcast = "staged" if kind == "all_reduce" else "none"
    config = KernelConfig(operator=f"gemm_{kind}", broadcast=broadcast, network=group.network)  # type: ignore[arg-type]
    config = config.with_tile(128, 128)
    m, n, k = 100 * group.world, 520, 136
    inputs = [random_input(rank, device, m, n, k, config, seed, True) for rank, device in enumerate(group.devices)]
    outs = nan_outputs(group, m if kind == "all_reduce" else m // group.world, n, config)
    launches = group.prepare(config, inputs, outs)
    truth, _ = summed(inputs, config, "cuda:0")

    def check() -> None:
        for rank, out in enumerate(outs):
            assert_bitwise(out, expected_of(config, rank, group.world, truth), f"{kind} {seed} rank {rank}")

    return Work(run=lambda: group.run(launches), check=check, keep=inputs)


def evidence(group: NodeGroup) -> dict[str, Any]:
    """Reports of all ranks; and of each proxy how many commands it was given, has taken and has completed, in the epoch
    that failed too, those that took long, and how many flags of that epoch have come, now that all kernels have ended.
    """
    reports = [fault.report() for fault in group.faults]
    epoch = next((int(one.expected) for one in reports if one.code), 0)
    at, flags_at, num_flags = (
        group.layout.network_offset, group.layout.network_flags_offset, group.layout.num_network_flags
    )  # fmt: skip
    ranks = []
    for rank, proxy in enumerate(group.proxies):
        events, _ = proxy.timeline()
        words = group.workspaces[rank][flags_at : flags_at + 4 * num_flags].view(torch.int32)
        given = int(group.workspaces[rank][at : at + 8].view(torch.int64).item())
        counters = proxy.counters()
        ranks.append(
            {
                "given": given,
                "counters": {
                    name: counters[name] for name in ("commands", "completions", "stalls", "refusals", "longest_round")
                },
                "of_epoch": {
                    kind: sum(one.kind == kind and one.epoch == epoch for one in events)
                    for kind in ("taken", "posted", "completed")
                },
                "slow": slow_commands(events, epoch),
                "flags_here": int((words == epoch).sum()),
                "report": group.faults[rank].describe() if reports[rank].code else "",
            }
        )
    return {"epoch": epoch, "ranks": ranks}


def slow_commands(events: list[Any], epoch: int) -> list[dict[str, Any]]:
    """Those whose way through the proxy took long, or did not end. Units: milliseconds after the first event."""
    first_ns = min((one.time_ns for one in events), default=0)
    seen: dict[int, dict[str, Any]] = {}
    for one in events:
        if one.kind in ("taken", "posted", "completed"):
            entry = seen.setdefault(one.ticket, {"chunk": one.chunk, "epoch": one.epoch, "bytes": one.num_bytes})
            entry[one.kind] = one.time_ns
    slow: list[dict[str, Any]] = []
    for ticket, entry in seen.items():
        if "completed" in entry and entry["completed"] - entry.get("taken", first_ns) <= _SLOW_NS:
            continue
        times: dict[str, Any] = {
            kind: (entry[kind] - first_ns) / 1e6 for kind in ("taken", "posted", "completed") if kind in entry
        }
        slow.append({"ticket": ticket, "of_failed_epoch": entry["epoch"] == epoch, **entry, **times})
    return slow[:8]


def run_case(case: Case, seconds: float) -> dict[str, Any]:
    """In this process."""
    started = time.monotonic()
    stress = Stress(case)
    began = time.monotonic()
    stress.run_for(seconds)
    return {
        "case": case.name, **asdict(case), "rounds": stress.rounds, "launches": stress.rounds * _BEHIND,
        "failures": len(stress.failures), "evidence": stress.failures, "start_s": round(began - started, 1),
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


def in_processes(cases: tuple[Case, ...], seconds: float, total_s: float) -> Iterator[dict[str, Any]]:
    """Each case in its own, as long as there is time."""
    end_s = time.monotonic() + total_s
    for case in cases:
        left_s = end_s - time.monotonic()
        if left_s < seconds + 2:
            yield {"case": case.name, "skipped": "no time left"}
            continue
        command = [sys.executable, "-m", "tests.gpu.network_stress", "--run", case.name, "--each", str(seconds)]
        environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": str(case.queues)}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=min(left_s, _START_S + seconds)
            )
        except subprocess.TimeoutExpired:
            yield {"case": case.name, "hung": True}
            continue
        lines = done.stdout.strip().splitlines()
        yield (
            json.loads(lines[-1])
            if done.returncode == 0 and lines
            else {"case": case.name, "died": done.stderr[-1500:]}
        )


def main() -> None:
    """All cases, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=50.0, help="for all cases together")
    parser.add_argument("--each", type=float, default=4.0)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--run", default="", help="one case, in this process")
    options = parser.parse_args()
    named = {case.name: case for case in CASES}
    if options.run:
        sys.stdout.write(json.dumps(run_case(named[options.run], options.each)) + "\n")
        return
    chosen = tuple(case for case in CASES if not options.only or case.name in options.only)
    for row in in_processes(chosen, options.each, options.seconds):
        sys.stdout.write(json.dumps({**row, "evidence": len(row.get("evidence", ()))}) + "\n")
        sys.stdout.flush()
        if options.out is not None:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
