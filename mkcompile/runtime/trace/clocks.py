"""One time axis for all ranks, from the flags themselves: none is seen before it was sent.

Every flag from rank a to rank b says that b's clock is at least so far ahead of a's; flags the other way bound it from
above. The tightest of both leave an interval, whose middle is the estimate and whose half is how far it can be off. A
rank that came early and did nothing but wait for another's flag has seen it as soon as it came: that bounds both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mkcompile.runtime.recorder import RankTrace
from mkcompile.runtime.trace.instances import LANE, ROLE, Instance, instances

_Key = tuple[object, ...]
#: A flag on its way, with its reading. Source: docs/timeline.md.
_FLIGHT_NS = 2_500
#: Shorter waits found the flag there.
_WAIT_NS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """What to add to a rank's times to have them in those of the first rank.

    Units: nanoseconds. `within_ns`: the true value lies at most so far away; None: no flags between the two were
    recorded in both directions, and `offset_ns` makes their first tasks begin together.
    """

    offset_ns: int
    within_ns: int | None


@dataclass(frozen=True, slots=True)
class _Flags:
    """When flags of one rank were sent at the earliest and seen at the latest, by the rank's own clock.

    `awaited`: keys of `seen` whose flag ended a wait for nothing else.
    """

    sent: dict[_Key, int]
    seen: dict[_Key, int]
    awaited: set[_Key]


def align(traces: Sequence[RankTrace]) -> tuple[Clock, ...]:
    """A clock for each trace, relative to the first."""
    flags = [_flags(trace) for trace in traces]
    clocks = {0: Clock(offset_ns=0, within_ns=0)}
    reached = [0]
    while reached:
        near = reached.pop(0)
        for far in set(range(len(traces))) - set(clocks):
            bounds = _bounds(flags[near], flags[far])
            if bounds is not None:
                clocks[far] = _add(clocks[near], *bounds)
                reached.append(far)
    unknown = [Clock(offset_ns=_begin_ns(traces[0]) - _begin_ns(trace), within_ns=None) for trace in traces]
    return tuple(clocks.get(i, unknown[i]) for i in range(len(traces)))


def _add(near: Clock, low_ns: int, high_ns: int) -> Clock:
    assert near.within_ns is not None
    return Clock(
        offset_ns=near.offset_ns + (low_ns + high_ns) // 2, within_ns=near.within_ns + (abs(high_ns - low_ns) + 1) // 2
    )


def _begin_ns(trace: RankTrace) -> int:
    return int(trace.tasks["start_ns"].min()) if len(trace.tasks) else 0


def _flags(trace: RankTrace) -> _Flags:
    flags = _Flags({}, {}, set())
    for one in instances(trace):
        ranks = trace.groups[one.launch]
        if trace.rank not in ranks:
            continue
        launch = (trace.launches[one.launch].split(", grid")[0], ranks, one.epoch)
        for key, sent_ns in _sent(one, ranks, trace.rank):
            flags.sent[(*launch, *key)] = sent_ns
        for key, seen_ns in _seen(one, ranks, trace.rank):
            known_ns = flags.seen.setdefault((*launch, *key), seen_ns)
            flags.seen[(*launch, *key)] = min(known_ns, seen_ns)
        flags.awaited.update(
            (*launch, *key) for key, end_ns in _awaited(one, ranks) if flags.seen[(*launch, *key)] == end_ns
        )
    return flags


def _sent(one: Instance, ranks: tuple[int, ...], rank: int) -> Iterator[tuple[_Key, int]]:
    """Of an own tile (or the launch) all are told, of another's tile its owner."""
    for task in one.tasks[one.tasks["role"] == ROLE["signal"]]:
        owner, tile = ranks[task["owner"]], int(task["tile"])
        yield (rank, None if owner == rank else owner, tile), int(task["start_ns"]) + int(task["waited_ns"])


def _seen(one: Instance, ranks: tuple[int, ...], rank: int) -> Iterator[tuple[_Key, int]]:
    """A store thread's wait for an own tile is one for all peers' partials; the others are for what an owner sends."""
    receives = one.tasks[one.tasks["role"] == ROLE["receive"]]
    in_store = (receives["lane"] == LANE["store 0"]) | (receives["lane"] == LANE["store 1"])
    for task in receives[in_store]:
        if ranks[task["owner"]] == rank:
            for source in ranks:
                yield (source, rank, int(task["tile"])), int(task["end_ns"])
    for task in receives[~in_store]:
        yield (ranks[task["owner"]], None, int(task["tile"])), int(task["end_ns"])
    for task in one.tasks[(one.tasks["role"] == ROLE["copy"]) & (one.tasks["owner"] < len(ranks))]:
        yield (ranks[task["owner"]], None, int(task["tile"])), int(task["start_ns"])


def _awaited(one: Instance, ranks: tuple[int, ...]) -> Iterator[tuple[_Key, int]]:
    """Receipts of a peer's entry by a thread that looked at nothing else meanwhile: those of who loads its rows."""
    tasks = one.tasks[(one.tasks["role"] == ROLE["receive"]) & (one.tasks["lane"] == LANE["signal"])]
    for task in tasks[tasks["waited_ns"] > _WAIT_NS]:
        yield (ranks[task["owner"]], None, int(task["tile"])), int(task["end_ns"])


def _bounds(near: _Flags, far: _Flags) -> tuple[int, int] | None:
    """The smallest and the largest number that far's times may need added to be near's."""
    low_ns = {key: sent_ns - far.seen[key] for key, sent_ns in near.sent.items() if key in far.seen}
    high_ns = {key: near.seen[key] - sent_ns for key, sent_ns in far.sent.items() if key in near.seen}
    if not low_ns or not high_ns:
        return None
    low, high = max(low_ns.values()), min(high_ns.values())
    at_most = [ns + _FLIGHT_NS for key, ns in low_ns.items() if key in far.awaited]
    at_least = [ns - _FLIGHT_NS for key, ns in high_ns.items() if key in near.awaited]
    tight = max([low, *at_least]), min([high, *at_most])
    return tight if tight[0] <= tight[1] else (low, high)
