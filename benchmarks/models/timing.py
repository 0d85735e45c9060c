"""Contenders timed in turn: chunks of consecutive calls, one synchronisation at the end of each, the slowest rank's.

A chunk's time is the host's, so that a row whose launches take longer than its kernels says so. A contender that keeps
its GPU busy runs by itself for a tenth of a second before its chunks: it finds the clock that its own power draw leaves
(docs/decisions/504). Where the host takes the time the GPU idles, and there is no heat to wait for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..rounds import order_of_round

_CHUNK_MS, _OWN_HEAT_MS = 30.0, 100.0
_MOST_CALLS, _LEAST_ROUNDS, _MOST_ROUNDS = 40, 2, 7
#: Chunks of one visit to a contender; of steps that are as long as a chunk, fewer.
_CHUNKS, _CHUNKS_OF_LONG = 3, 2
#: Of a call's time: where the host needs more than this to launch it, the GPU waits for the host.
_HOST_SHARE = 0.8

Step = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and tenths of the chunks. Units: milliseconds a call."""

    median: float
    p10: float
    p90: float

    @staticmethod
    def of(samples: list[float]) -> Spread:
        """Of at least one sample."""
        ordered = sorted(samples)
        last = len(ordered) - 1
        return Spread(median=statistics.median(ordered), p10=ordered[round(0.1 * last)], p90=ordered[round(0.9 * last)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What one contender does when its turn comes in a round: calls that are not counted, then chunks of calls.

    Units: `seconds` that it takes.
    """

    heating: int
    chunks: int
    calls: int
    seconds: float

    @staticmethod
    def of(call_ms: float, host_ms: float) -> Visit:
        """From what a call takes, and what of it the host takes to launch it."""
        calls = max(1, min(_MOST_CALLS, int(_CHUNK_MS / call_ms)))
        heating = 0 if host_ms > _HOST_SHARE * call_ms else max(1, int(_OWN_HEAT_MS / call_ms))
        chunks = _CHUNKS if call_ms < _CHUNK_MS else _CHUNKS_OF_LONG
        seconds = (heating + chunks * calls) * call_ms * 1e-3
        return Visit(heating=heating, chunks=chunks, calls=calls, seconds=seconds)


def synchronize() -> None:
    """Wait for this rank's GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def chunk_ms(step: Step, num_calls: int, host_group: dist.ProcessGroup) -> tuple[float, float]:
    """Mean time of consecutive calls on this rank after all ranks have come here, and how much of it launches take."""
    synchronize()
    dist.barrier(group=host_group)
    started = time.perf_counter()
    for _ in range(num_calls):
        step()
    launched = time.perf_counter()
    synchronize()
    return (time.perf_counter() - started) / num_calls * 1e3, (launched - started) / num_calls * 1e3


def slowest(samples: list[float], host_group: dist.ProcessGroup) -> list[float]:
    """Each sample's largest value over the ranks."""
    values = torch.tensor(samples, dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX, group=host_group)
    return values.tolist()


def visits(steps: Mapping[str, Step], host_group: dist.ProcessGroup) -> dict[str, Visit]:
    """From two calls of each, the same on all ranks."""
    found = {}
    for name, step in steps.items():
        first, second = (chunk_ms(step, 1, host_group) for _ in range(2))
        call_ms, host_ms = slowest(list(min(first, second)), host_group)
        found[name] = Visit.of(call_ms, host_ms)
    return found


def interleaved(steps: Mapping[str, Step], budget_s: float, host_group: dist.ProcessGroup) -> dict[str, Spread]:
    """Every step's time; rounds follow from the budget, and all ranks make the same ones.

    Units: `budget_s` seconds for all rounds of all steps, exceeded where two rounds take longer.
    """
    of_each = visits(steps, host_group)
    round_s = sum(visit.seconds for visit in of_each.values())
    rounds = max(_LEAST_ROUNDS, min(_MOST_ROUNDS, int(budget_s / max(round_s, 1e-6))))
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(rounds):
        for name in order_of_round(steps, index):
            step, visit = steps[name], of_each[name]
            for _ in range(visit.heating):
                step()
            samples[name] += [chunk_ms(step, visit.calls, host_group)[0] for _ in range(visit.chunks)]
    return {name: Spread.of(slowest(of_step, host_group)) for name, of_step in samples.items()}
