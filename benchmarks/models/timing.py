"""Contenders timed in turn: chunks of consecutive calls, one synchronisation at the end of each, the slowest rank's.

A chunk's time is the host's, so that a row whose launches take longer than its kernels says so.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..rounds import order_of_round

_CHUNK_MS = 30.0
_MOST_CALLS, _LEAST_ROUNDS, _MOST_ROUNDS = 40, 5, 21

Step = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and tenths of the rounds. Units: milliseconds a call."""

    median: float
    p10: float
    p90: float

    @staticmethod
    def of(samples: list[float]) -> Spread:
        """Of at least one sample."""
        ordered = sorted(samples)
        last = len(ordered) - 1
        return Spread(median=statistics.median(ordered), p10=ordered[round(0.1 * last)], p90=ordered[round(0.9 * last)])


def synchronize() -> None:
    """Wait for this rank's GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def chunk_ms(step: Step, num_calls: int, host_group: dist.ProcessGroup) -> float:
    """Mean time of consecutive calls on this rank, after all ranks have come here."""
    synchronize()
    dist.barrier(group=host_group)
    started = time.perf_counter()
    for _ in range(num_calls):
        step()
    synchronize()
    return (time.perf_counter() - started) / num_calls * 1e3


def slowest(samples: list[float], host_group: dist.ProcessGroup) -> list[float]:
    """Each sample's largest value over the ranks."""
    values = torch.tensor(samples, dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX, group=host_group)
    return values.tolist()


def interleaved(steps: Mapping[str, Step], budget_s: float, host_group: dist.ProcessGroup) -> dict[str, Spread]:
    """Every step's time; rounds follow from the budget, and all ranks make the same ones.

    Units: `budget_s` seconds for all rounds of all steps, exceeded where five rounds take longer.
    """
    for step in steps.values():
        step()
    first = slowest([chunk_ms(step, 2, host_group) for step in steps.values()], host_group)
    num_calls = {name: max(1, min(_MOST_CALLS, int(_CHUNK_MS / ms))) for name, ms in zip(steps, first, strict=True)}
    round_s = sum(ms * num for ms, num in zip(first, num_calls.values(), strict=True)) * 1e-3
    rounds = max(_LEAST_ROUNDS, min(_MOST_ROUNDS, int(budget_s / max(round_s, 1e-6))))
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(rounds):
        for name in order_of_round(steps, index):
            samples[name].append(chunk_ms(steps[name], num_calls[name], host_group))
    return {name: Spread.of(slowest(of_step, host_group)) for name, of_step in samples.items()}
