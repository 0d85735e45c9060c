"""`tune`: replaces predictions by measurements, in lock-step over the ranks of a group.

Rank 0 says what to measure; then, for each bucket, all ranks make its candidates ready one by one, tell each other that
they are, run them in turn, and tell each other what came out. Results are on rank 0's disk after each bucket, so that a
broken run goes on where it was.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

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
_T = TypeVar("_T")


class TuneError(MkcompileError, RuntimeError):
    """A rank failed while candidates were measured; the message names rank, candidate and cause."""


class Measurer(Protocol):
    """How a candidate is timed; the runtime has one for kernels, `plan.reference` one for CPU tensors."""

    def ahead(self, work: Sequence[tuple[Problem, Plan]]) -> None:
        """Told once, on all ranks, what will be prepared; may compile it. Raises nothing that `prepare` would."""

    def prepare(self, problem: Problem, plan: Plan) -> Callable[[], float]:
        """Make everything ready (tensors, compiled kernel) without talking to others, and return what runs it once:
        all ranks call that together, several times, in turn with the bucket's other candidates. It returns this rank's
        seconds a call.

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
    """What to tune: problems with a known m (each stands for its bucket), the best `limit` candidates of each.

    `rounds`: how often each candidate is timed, after a first time that is not counted.
    """

    problems: Sequence[Problem]
    topology: Topology
    policy: Policy = DEFAULT_POLICY
    limit: int = 6
    rounds: int = 7
    folder: Path | None = None


def tune(request: Request, measurer: Measurer, ranks: Ranks, progress: Progress | None = None) -> Results:
    """Measure what is not on disk yet; the results, the same on every rank.

    Raises: TuneError, on every rank that is alive, where one fails or never comes.
    """
    results = load_results(request.topology, request.folder) if ranks.rank == 0 else Results()
    wanted = _wanted(request)
    try:
        open_names = ranks.share("work", json.dumps([i for i, item in enumerate(wanted) if not _done(results, item)]))
        session = _Session(measurer=measurer, ranks=ranks, rounds=request.rounds, progress=progress or _show_nothing)
        session.todo = [wanted[index] for index in json.loads(open_names)]
        session.compile()
        for entry in dict.fromkeys(item.entry for item in session.todo):
            for measured in session.measure(entry):
                results.add(entry, measured)
            if ranks.rank == 0:
                save_results(request.topology, results, request.folder)
        session.progress(len(session.todo), len(session.todo), "")
        return Results.from_json(ranks.share("results", results.to_json()))
    except AbsentRankError as error:
        raise TuneError(str(error)) from error


def _show_nothing(done: int, total: int, what: str) -> None:
    return None


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


@dataclass(slots=True, kw_only=True)
class _Session:
    """One run of `tune` on this rank."""

    measurer: Measurer
    ranks: Ranks
    rounds: int
    progress: Progress
    todo: list[Item] = field(default_factory=list)

    def compile(self) -> None:
        """What can be made ready ahead, on all ranks."""
        if self.todo:
            self.progress(0, len(self.todo), "compiling")
            with _Telling(self.ranks, "ahead", self.todo[0]):
                self.measurer.ahead([(item.problem, item.plan) for item in self.todo])
            _raise_if_broken(self.ranks.exchange("ahead", _OK), self.todo[0])

    def measure(self, entry: str) -> list[Measured]:
        """The entry's open candidates on all ranks: the slowest rank's time, or why some rank can't run one."""
        outcomes: list[Measured] = []
        runs: list[tuple[Item, Callable[[], float]]] = []
        for index, item in enumerate(self.todo):
            if item.entry != entry:
                continue
            self.progress(index, len(self.todo), f"{item.plan.name} m={item.problem.m}")
            run, error = self._ready(index, item)
            if run is None:
                outcomes.append(Measured(plan=item.plan, error=error))
            else:
                runs.append((item, run))
        return [*outcomes, *self._run(entry, runs)]

    def _ready(self, index: int, item: Item) -> tuple[Callable[[], float] | None, str]:
        """What runs the candidate, if every rank has run it once; else each rank's reason."""
        run, error = self._on_all_ranks(f"{index}/ready", item, lambda: self.measurer.prepare(item.problem, item.plan))
        if run is None:
            return None, error
        # not counted; what only a launch finds out (room in the workspace) is found out here
        seconds, error = self._on_all_ranks(f"{index}/first", item, run)
        return (None if seconds is None else run), error

    def _on_all_ranks(self, name: str, item: Item, act: Callable[[], _T]) -> tuple[_T | None, str]:
        """What it returns here, if it succeeds on every rank; else each rank's reason."""
        done: _T | None = None
        own = _OK
        with _Telling(self.ranks, name, item):
            try:
                done = act()
            except MkcompileError as error:
                own = f"{type(error).__name__}: {error}"
        said = self.ranks.exchange(name, own)
        _raise_if_broken(said, item)
        unable = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text != _OK]
        return (None if unable else done), "; ".join(unable)

    def _run(self, entry: str, runs: Sequence[tuple[Item, Callable[[], float]]]) -> list[Measured]:
        """All candidates in turn, so that each meets the same heat of the chip and the same neighbours."""
        samples: list[list[float]] = [[] for _ in runs]
        key = f"{entry}/ran"
        for _ in range(self.rounds):
            for (item, run), taken in zip(runs, samples, strict=True):
                with _Telling(self.ranks, key, item):
                    taken.append(run())
        if not runs:
            return []
        said = self.ranks.exchange(key, json.dumps(samples))
        _raise_if_broken(said, runs[0][0])
        by_rank = [json.loads(text) for text in said]
        return [
            Measured(plan=item.plan, seconds=_slowest_median([each[index] for each in by_rank]))
            for index, (item, _) in enumerate(runs)
        ]


def _slowest_median(by_rank: Sequence[Sequence[float]]) -> float:
    """The median over the rounds of the slowest rank's time in each."""
    slowest: list[float] = [max(each) for each in zip(*by_rank, strict=True)]
    return statistics.median(slowest)


_BROKEN = "broken: "


def _raise_if_broken(said: Sequence[str], item: Item) -> None:
    broken = [f"rank {rank} failed: {t.removeprefix(_BROKEN)}" for rank, t in enumerate(said) if t.startswith(_BROKEN)]
    if broken:
        raise TuneError(f"tuning {item.problem.operator} at m={item.problem.m}: {'; '.join(broken)}")


class _Telling:
    """Whatever goes wrong inside is said to the other ranks before it is raised here."""

    def __init__(self, ranks: Ranks, key: str, item: Item) -> None:
        self._ranks, self._key, self._item = ranks, key, item

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        where = f"{self._item.plan.name} at m={self._item.problem.m}"
        self._ranks.say(self._key, f"{_BROKEN}{where}: {type(error).__name__}: {error}")
        if isinstance(error, Exception):
            raise TuneError(f"tuning {where}: this rank ({self._ranks.rank}) failed: {error}") from error
