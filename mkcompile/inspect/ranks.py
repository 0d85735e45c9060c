"""Runs one function on several ranks of this machine, each in a process of its own, and never waits for ever.

A rank reports steps while it works; the first rank that fails, dies or is late ends all of them.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")
Say = Callable[[str], None]
Work = Callable[[int, Say], Result]
OnStep = Callable[[int, str], None]

_LEAVE_S = 10.0  # for leaving the group once every result is here


class RankError(Exception):
    """A rank raised, died or did not finish in time; the message says which one, in which step, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How many ranks, on which kind of device (`cpu`: gloo, `cuda`: NCCL, one GPU a rank, `shared`: gloo, all on the
    first GPU), and for how long.

    Units: `timeout_s` seconds for everything, `group_timeout_s` seconds for one collective.
    """

    world_size: int
    device: str
    timeout_s: float
    group_timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class _Step:
    text: str


@dataclass(frozen=True, slots=True)
class _Done(Generic[Result]):
    value: Result


@dataclass(frozen=True, slots=True)
class _Failed:
    traceback: str


@dataclass(frozen=True, slots=True)
class _Parent:
    connection: Connection
    all_ended: Barrier


def run_ranks(work: Work[Result], launch: Launch, on_step: OnStep) -> list[Result]:
    """The results in rank order; `on_step(rank, text)` is called as ranks report.

    Raises: RankError.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="mkcompile-demo-") as folder:
        ranks: list[tuple[BaseProcess, Connection]] = []
        all_ended = context.Barrier(launch.world_size)
        try:
            for rank in range(launch.world_size):
                receiver, sender = context.Pipe(duplex=False)
                arguments = (rank, work, launch, Path(folder) / "rendezvous", _Parent(sender, all_ended))
                process: BaseProcess = context.Process(target=_rank_main, args=arguments, daemon=True)
                process.start()
                sender.close()
                ranks.append((process, receiver))
            results = _collect(ranks, time.monotonic() + launch.timeout_s, on_step)
            for process, _ in ranks:
                process.join(timeout=_LEAVE_S)
            return results
        finally:
            for process, _ in ranks:
                process.kill()
                process.join()


def _collect(ranks: Sequence[tuple[BaseProcess, Connection]], deadline: float, on_step: OnStep) -> list[Any]:
    results: dict[int, Any] = {}
    steps = ["starting"] * len(ranks)
    pending = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(f"rank {rank} ({steps[rank]})" for rank in pending.values())
            raise RankError(f"out of time; still running: {late}")
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = pending[connection]
            message = _receive(connection, ranks[rank][0])
            if isinstance(message, _Step):
                steps[rank] = message.text
                on_step(rank, message.text)
            elif isinstance(message, _Done):
                results[rank] = message.value
                del pending[connection]
            else:
                raise RankError(f"rank {rank} failed while {steps[rank]}:\n{message.traceback}")
    return [results[rank] for rank in range(len(ranks))]


def _receive(connection: Connection, process: BaseProcess) -> _Step | _Done[Any] | _Failed:
    try:
        message: _Step | _Done[Any] | _Failed = connection.recv()
    except EOFError:
        process.join(timeout=5.0)
        return _Failed(f"the process ended with exit code {process.exitcode} and said nothing")
    return message


def _rank_main(rank: int, work: Work[Any], launch: Launch, rendezvous: Path, parent: _Parent) -> None:
    send = parent.connection.send
    try:
        torch.set_num_threads(1)
        if launch.device != "cpu":
            torch.cuda.set_device(rank if launch.device == "cuda" else 0)
        dist.init_process_group(
            # named for each device, or a mesh would make a group of its own beside it
            {"cuda": "nccl", "shared": "cpu:gloo,cuda:gloo"}.get(launch.device, "gloo"),
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=launch.world_size,
            timeout=timedelta(seconds=launch.group_timeout_s),
        )
        send(_Done(work(rank, lambda text: send(_Step(text)))))
        parent.all_ended.wait(launch.timeout_s)  # a peer may still be connecting: who leaves now breaks its group
        dist.destroy_process_group()
    except BaseException:  # the traceback is the parent's to show, whatever ended this rank
        send(_Failed(traceback.format_exc()))
