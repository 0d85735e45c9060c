"""Several ranks on this machine, for tests: one spawn runs many named cases, each on a process group of its own.

    CASES = {"sum": sum_case, "wide": functools.partial(sum_case_of, width=64)}     # module-level functions

    @pytest.fixture(scope="module")
    def outcomes() -> Outcomes:
        return run_cases(CASES, world_size=2)

    @pytest.mark.parametrize("name", CASES)
    def test_case(outcomes: Outcomes, name: str) -> None:
        outcomes.values(name)        # what the ranks returned, in rank order; an AssertionError if a rank raised

A case is called as `case(rank, world_size)` and returns anything that pickles. What a case compiles or leaves in the
group does not reach the next one: torch.compile is reset and the group is made anew.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

Case = Callable[[int, int], Any]

_POLL_S = 0.01
_LATE_S = 60.0
# Imported once, in the server that ranks are forked from.
_PRELOAD = ("torch.distributed", "torch.distributed.tensor", "tests.warm")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """What a rank raised: the class's name, the message, the whole traceback."""

    kind: str
    message: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """What one rank made of one case: a value, or an error."""

    value: Any = None
    error: RankError | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The results of all cases, in rank order."""

    by_case: Mapping[str, list[RankResult]]

    def values(self, name: str) -> list[Any]:
        """The ranks' return values. Raises: AssertionError with every rank's traceback if one of them raised."""
        errors = [f"--- rank {rank}\n{e.traceback}" for rank, e in enumerate(self.errors(name)) if e is not None]
        assert not errors, f"case {name!r} failed\n" + "\n".join(errors)
        return [result.value for result in self.by_case[name]]

    def errors(self, name: str) -> list[RankError | None]:
        """The ranks' errors, None for a rank that returned."""
        return [result.error for result in self.by_case[name]]

    def seconds(self, name: str) -> list[float]:
        """How long each rank took."""
        return [result.seconds for result in self.by_case[name]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    cases: Mapping[str, Case]
    world_size: int
    directory: Path
    timeout_s: float
    deadline: float
    group_timeout_s: float
    environment: Mapping[str, str]
    init_group: bool
    one_group: bool


def run_cases(
    cases: Mapping[str, Case],
    world_size: int,
    *,
    timeout_s: float = 300.0,
    group_timeout_s: float = 120.0,
    environment: Mapping[str, str] | None = None,
    init_group: bool = True,
    one_group: bool = False,
) -> Outcomes:
    """Run every case on `world_size` gloo ranks, one process a rank for all cases.

    `timeout_s` ends the whole spawn: ranks still running are killed, and their cases fail with the stack they were in.
    `group_timeout_s` is the process group's timeout; a rank may be compiling for a while on a loaded machine.
    `environment` is set in the ranks before they run anything, but after torch is imported: right for MKCOMPILE_* and
    TORCHINDUCTOR_CACHE_DIR, too late for most of torch's own. `one_group`: all cases share the group, until one fails;
    for many cases with DTensors, whose caches hold on to every mesh and the threads of its group.
    """
    with tempfile.TemporaryDirectory(prefix="mkcompile-test-") as folder:
        job = _Job(
            cases=cases,
            world_size=world_size,
            directory=Path(folder),
            timeout_s=timeout_s,
            deadline=time.monotonic() + timeout_s,
            group_timeout_s=group_timeout_s,
            environment=environment or {},
            init_group=init_group,
            one_group=one_group,
        )
        exit_codes = _run_ranks(job)
        return Outcomes(
            {name: [_load(job, name, rank, exit_codes[rank]) for rank in range(world_size)] for name in cases}
        )


def run_case(case: Case, world_size: int, **options: Any) -> list[Any]:
    """One case; the ranks' values. Options as in `run_cases`."""
    return run_cases({"case": case}, world_size, **options).values("case")


def _run_ranks(job: _Job) -> list[int | None]:
    """Start, wait until the deadline, kill what is left; the exit codes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOAD))
    ranks = [context.Process(target=_rank_main, args=(rank, job), daemon=True) for rank in range(job.world_size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(max(0.0, job.deadline - time.monotonic()) + 2.0)
    exit_codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    return exit_codes


def _load(job: _Job, name: str, rank: int, exit_code: int | None) -> RankResult:
    path = _result_path(job, name, rank)
    if path.exists():
        result: RankResult = pickle.loads(path.read_bytes())
        return result
    stack = job.directory / f"stack.{rank}"
    how = f"exit code {exit_code}, {job.timeout_s} s were given"
    message = f"rank {rank} gave no result for {name!r} ({how})"
    text = stack.read_text() if stack.exists() else ""
    return RankResult(error=RankError(kind="NoResult", message=message, traceback=f"{message}\n{text}"))


def _result_path(job: _Job, name: str, rank: int) -> Path:
    return job.directory / f"result.{list(job.cases).index(name)}.{rank}"


def _rank_main(rank: int, job: _Job) -> None:
    set_environment(job.environment)
    with (job.directory / f"stack.{rank}").open("w") as stack:
        # one clock for all processes of a machine; the rank ends itself, should nobody be left to kill it
        left_s = max(job.deadline - time.monotonic(), 1.0)
        faulthandler.dump_traceback_later(left_s, exit=True, file=stack)
        for name, case in job.cases.items():
            started = time.monotonic()
            result = _run_one(case, rank, job, name)
            result = RankResult(value=result.value, error=result.error, seconds=time.monotonic() - started)
            target = _result_path(job, name, rank)
            partial = target.with_name(target.name + ".partial")
            partial.write_bytes(pickle.dumps(result))
            partial.rename(target)
            _between_cases(job, name)
        faulthandler.cancel_dump_traceback_later()


def set_environment(values: Mapping[str, str]) -> None:
    """Of this rank, where the server that it was forked from has read its own; before the rank uses mkcompile."""
    from mkcompile.config import settings
    from mkcompile.runtime.wiring import install

    os.environ.update(values)
    settings.cache_clear()
    install()


def _run_one(case: Case, rank: int, job: _Job, name: str) -> RankResult:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(1000 + rank)
    torch._dynamo.reset()
    try:
        if job.init_group and not dist.is_initialized():
            _join_group(rank, job, name)
        return RankResult(value=case(rank, job.world_size))
    except BaseException as error:  # a test harness reports everything, SystemExit included
        text = traceback.format_exc()
        return RankResult(error=RankError(kind=type(error).__name__, message=str(error), traceback=text))
    finally:
        _forget_compiled()


def _join_group(rank: int, job: _Job, name: str) -> None:
    """Returns when every rank is connected: one that left at once would break the group of one that is not, yet."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    timeout = timedelta(seconds=job.group_timeout_s)
    store = FileStore(str(job.directory / f"rendezvous.{list(job.cases).index(name)}"), job.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world_size, timeout=timeout)
    connected = [f"connected.{peer}" for peer in range(job.world_size)]
    store.set(connected[rank], "")
    store.wait(connected, timeout)


def _between_cases(job: _Job, name: str) -> None:
    """All ranks come to the next case together: a new group's short timeout counts for its connections, too."""
    is_last = name == list(job.cases)[-1]
    if is_last or not job.one_group:
        _leave_group()
    if not is_last and _any_failed(job, name):
        _leave_group()
    elif not is_last:
        _leave_subgroups()


def _any_failed(job: _Job, name: str) -> bool:
    """Did the case fail on any rank? Then their next collectives might not fit. Waits until all have finished it."""
    paths = [_result_path(job, name, rank) for rank in range(job.world_size)]
    deadline = min(job.deadline, time.monotonic() + max(job.group_timeout_s, _LATE_S))
    while time.monotonic() < deadline and not all(path.exists() for path in paths):
        time.sleep(_POLL_S)
    results = [pickle.loads(path.read_bytes()) for path in paths if path.exists()]
    return len(results) < job.world_size or any(result.error is not None for result in results)


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # a group that something still refers to keeps its threads, which never sleep for long


def _leave_subgroups() -> None:
    """Groups that a case has made (by a mesh): each has threads that wake up a hundred times a second."""
    import torch.distributed as dist

    if dist.is_initialized():
        for group in [one for one in dist.distributed_c10d._world.pg_map if one is not dist.group.WORLD]:
            dist.destroy_process_group(group)
        gc.collect()


def _forget_compiled() -> None:
    """Reset the compiler, and drop the graphs that it keeps in the globals of the modules whose code it has compiled.

    A graph may hold the process group, and a module's functions are never let go of.
    """
    import torch
    from torch._dynamo.utils import CleanupManager

    torch._dynamo.reset()
    for key in list(CleanupManager.instance.values):
        CleanupManager.instance._remove_id(key)
