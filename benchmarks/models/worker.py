"""What one rank of a pair does: cell after cell, until all are measured or time is up."""

from __future__ import annotations

import faulthandler
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ..by_turns import SharedPlatform
from . import results
from .cells import Unit
from .contenders import first_compilation
from .look import first_profile
from .plan import Place, Plan
from .queue import Queue
from .together import run_unit
from .tracer import Tracer
from .turn import Turn

_GROUP_TIMEOUT_S = 300.0  # as long as others may hold the GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Units of cells, of which each pair takes the next one. `folder` is the run's own, with queue and locks; `caches`
    may be shared with other runs.

    `common` goes into every row. `lane`: which two GPUs of the machine this pair shares with others. `lock`: a file
    that whoever uses those GPUs has locked, None for one of this run only.
    Units: `deadline` of `time.time`; no cell begins less than `cell_s` seconds before it.
    """

    units: tuple[Unit, ...]
    plan: Plan
    folder: Path
    caches: Path
    out: Path
    common: dict[str, Any]
    deadline: float
    cell_s: float
    lane: int = 0
    lock: Path | None = None

    @property
    def num_cells(self) -> int:
        """Of all units."""
        return sum(map(len, self.units))

    @property
    def queue(self) -> Queue:
        """Of all pairs on all lanes."""
        return Queue(self.folder / "next")


def work(rank: int, say: Callable[[str], None], *, job: Job) -> int:
    """How many units were measured."""
    faulthandler.enable()  # a crash is to say where
    on_gpu, tracer = job.plan.device != "cpu", Tracer(SharedPlatform() if job.plan.device == "shared" else None)
    mesh = init_device_mesh("cuda" if on_gpu else "cpu", (dist.get_world_size(),))
    tracer.install()
    if job.plan.device == "cuda":
        _allow_async_tp(mesh.get_group())
    host_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=_GROUP_TIMEOUT_S))
    turn = Turn(path=job.lock or job.folder / f"turn-{job.lane}.lock", host_group=host_group, quiet=job.plan.quiet)
    turn.start_compiling()
    if on_gpu:
        say("starting the compiler")
        first_compilation("cuda", job.caches / "first")
    if job.plan.profile is not None:
        first_profile()
    done = 0
    while (number := _next_cell(job, rank, host_group, say)) is not None:
        say(f"begun {number}")
        if done:
            turn.start_compiling()
        place = Place(
            mesh=mesh, turn=turn, tracer=tracer, say=say, publish=partial(_write, job, rank),
            cache=job.caches if on_gpu else None, apart=job.folder / "apart",
        )  # fmt: skip
        rows = run_unit(job.units[number], job.plan, place)
        turn.finish_cell()
        _write(job, rank, rows)
        say(f"held the GPUs for {turn.held_s:.1f} s so far, waited {turn.waited_s:.1f} s")
        say(f"done {number}")
        done += 1
    return done


def _next_cell(job: Job, rank: int, host_group: dist.ProcessGroup, say: Callable[[str], None]) -> int | None:
    """What rank 0 takes, if there are cells and time left."""
    number = torch.tensor(-1)
    left_s = job.deadline - time.time()
    if rank == 0 and left_s > job.cell_s:
        number.fill_(job.queue.take())
    elif rank == 0 and job.queue.next() < len(job.units):
        say(f"{left_s:.0f} s are left, a cell is expected to take {job.cell_s:.0f} (--cell-s): none is begun")
    dist.broadcast(number, 0, group=host_group)
    found = int(number.item())
    return found if 0 <= found < len(job.units) else None


def _allow_async_tp(group: dist.ProcessGroup) -> None:
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    enable_symm_mem_for_group(group.group_name)


def _write(job: Job, rank: int, rows: list[dict[str, Any]]) -> None:
    """Rank 0's rows to the results; profiles, which are long, to a file beside them."""
    if rank != 0:
        return
    profiles = []
    for row in rows:
        found = {which: row.pop(f"{which}_profile", None) for which in ("fwd", "fwdbwd")}
        key = {name: row[name] for name in ("model", "form", "B", "T", "mode", "contender")}
        profiles += [{**key, "pass": which, **one} for which, one in found.items() if one]
    results.append(job.out, [{**row, **job.common} for row in rows])
    with job.out.with_name(job.out.stem + "-profiles.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(one) + "\n" for one in profiles)
