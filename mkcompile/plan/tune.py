"""`tune`: replaces predictions by measurements, in lock-step over the ranks of a group.

Rank 0 says what to measure; then, for each candidate, all ranks make ready, tell each other that they are, run, and
tell each other what came out. Results are on rank 0's disk after each candidate, so that a broken run goes on where it
was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mkcompile.errors import MkcompileError
from mkcompile.ops.problem import Problem
from mkcompile.plan.buckets import at_bucket, entry_name
from mkcompile.plan.candidates import Site, candidates
from mkcompile.plan.decide import DEFAULT_POLICY, Policy, check, unfused_plan
from mkcompile.plan.disk import Measured, Results, load_results, save_results
from mkcompile.plan.exchange import AbsentRankError, Ranks
from mkcompile.plan.plan import Plan
from mkcompile.plan.topology import Topology

_OK = "ok"


class TuneError(MkcompileError, RuntimeError):
    """A rank failed while candidates were measured; the message names rank, candidate and cause."""


class Measurer(Protocol):
    """How a candidate is timed; the runtime has one for kernels, `plan.reference` one for CPU tensors."""

    def prepare(self, problem: Problem, plan: Plan) -> Callable[[], float]:
        """Make everything ready (tensors, compiled kernel, workspace) without talking to other ranks, and return what
        runs it: all ranks call that together, and it returns this rank's median seconds.

        Raises: MkcompileError where this candidate can't run here; it is then left out on all ranks.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One candidate of one bucket: of entry `entry` of the results; `problem` is of the bucket's bound."""

    entry: str
    problem: Problem
    plan: Plan


# done, in all, what comes next
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to tune: problems with a known m (each stands for its bucket), the best `limit` candidates of each."""

    problems: Sequence[Problem]
    topology: Topology
    policy: Policy = DEFAULT_POLICY
    limit: int = 6
    folder: Path | None = None


def tune(request: Request, measurer: Measurer, ranks: Ranks, progress: Progress | None = None) -> Results:
    """Measure what is not on disk yet; the results, the same on every rank.

    Raises: TuneError, on every rank that is alive, where one fails or never comes.
    """
    results = load_results(request.topology, request.folder) if ranks.rank == 0 else Results()
    wanted = _wanted(request)
    try:
        open_names = ranks.share("work", json.dumps([i for i, item in enumerate(wanted) if not _done(results, item)]))
        todo: list[int] = json.loads(open_names)
        for done, index in enumerate(todo):
            item = wanted[index]
            if progress is not None:
                progress(done, len(todo), f"{item.plan.name} m={item.problem.m}")
            results.add(item.entry, _measure(index, item, measurer, ranks))
            if ranks.rank == 0:
                save_results(request.topology, results, request.folder)
        if progress is not None:
            progress(len(todo), len(todo), "")
        return Results.from_json(ranks.share("results", results.to_json()))
    except AbsentRankError as error:
        raise TuneError(str(error)) from error


def _wanted(request: Request) -> list[Item]:
    """All candidates, the same list on every rank."""
    items: dict[str, list[Item]] = {}
    for problem in request.problems:
        bound, entry = at_bucket(problem, problem.m), entry_name(problem)
        if entry not in items and check(bound, request.topology) is None:
            items[entry] = [Item(entry=entry, problem=bound, plan=plan) for plan in _plans(bound, request)]
    return [item for group in items.values() for item in group]


def _plans(problem: Problem, request: Request) -> list[Plan]:
    """Unfused first, then the candidates by predicted time."""
    unfused = unfused_plan(problem, request.topology)
    if request.topology.gpu.arch == "cpu":
        return [unfused]
    site = Site(problem=problem, topology=request.topology, reserve_sms=request.policy.reserve_sms)
    allowed = [one for one in candidates(site) if request.policy.allows(one.plan)]
    allowed.sort(key=lambda one: (one.seconds, one.plan.to_json()))
    return [unfused, *(one.plan for one in allowed[: request.limit])]


def _done(results: Results, item: Item) -> bool:
    return results.has(item.entry, item.plan)


def _measure(index: int, item: Item, measurer: Measurer, ranks: Ranks) -> Measured:
    """One candidate on all ranks: the slowest rank's time, or why some rank can't run it."""
    run: Callable[[], float] | None = None
    own = _OK
    with _Telling(ranks, f"{index}/ready", item):
        try:
            run = measurer.prepare(item.problem, item.plan)
        except MkcompileError as error:
            own = f"{type(error).__name__}: {error}"
    said = ranks.exchange(f"{index}/ready", own)
    _raise_if_broken(said, item)
    unable = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text != _OK]
    if unable:
        return Measured(plan=item.plan, error="; ".join(unable))
    assert run is not None
    with _Telling(ranks, f"{index}/ran", item):
        seconds = run()
    times = ranks.exchange(f"{index}/ran", repr(seconds))
    _raise_if_broken(times, item)
    return Measured(plan=item.plan, seconds=max(float(text) for text in times))


_BROKEN = "broken: "


def _raise_if_broken(said: Sequence[str], item: Item) -> None:
    broken = [f"rank {rank} failed: {t.removeprefix(_BROKEN)}" for rank, t in enumerate(said) if t.startswith(_BROKEN)]
    if broken:
        raise TuneError(f"tuning {item.plan.name} at m={item.problem.m}: {'; '.join(broken)}")


class _Telling:
    """Whatever goes wrong inside is said to the other ranks before it is raised here."""

    def __init__(self, ranks: Ranks, key: str, item: Item) -> None:
        self._ranks, self._key, self._item = ranks, key, item

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        self._ranks.say(self._key, f"{_BROKEN}{type(error).__name__}: {error}")
        if isinstance(error, Exception):
            where = f"{self._item.plan.name} at m={self._item.problem.m}"
            raise TuneError(f"tuning {where}: this rank ({self._ranks.rank}) failed: {error}") from error
