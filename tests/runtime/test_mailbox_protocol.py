"""Mailboxes, walked: every order in which two ranks can take their steps, over launches that exchange or don't.

A rank's launch is a list of steps: enter (tell the peer), send (store into the peer's words), take (wait for the words
of this launch, give them back), meet (wait for the peer to have entered), which ends it. What the walk demands: who
sends finds the word free, who takes finds what was sent in the same launch, and nobody waits for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

Step = tuple[str, int]  # what, launch
State = tuple[tuple[int, ...], tuple[tuple[int, ...], ...], tuple[int, ...]]  # positions, words at each rank, entered


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The protocol, with switches for the errors that the tests plant."""

    parities: int = 2
    clears: bool = True
    meets: bool = True


def steps_of(rank: int, exchanging: tuple[bool, ...], rules: Rules) -> list[Step]:
    """What one rank does, launch by launch. Rank 0 tells of its entry late, as a slow block 0 does."""
    steps: list[Step] = []
    for launch, exchanges in enumerate(exchanging, start=1):
        told, mail = [("enter", launch)], [("send", launch), ("take", launch)] if exchanges else []
        steps += mail[:1] + told + mail[1:] if rank == 0 else told + mail
        steps += [("meet", launch)] if rules.meets else []
    return steps


def moved(state: State, rank: int, step: Step, rules: Rules) -> State | str | None:
    """The state after a rank's next step; None where it must wait; else what went wrong."""
    positions, words, entered = state
    what, launch = step
    peer, slot = 1 - rank, launch % rules.parities
    boxes = [list(box) for box in words]
    seen = list(entered)
    if what == "enter":
        seen[rank] = launch
    elif what == "meet":
        if entered[peer] < launch:
            return None
    elif what == "send":
        if boxes[peer][slot]:
            return f"rank {rank} sends in launch {launch} over what came in launch {boxes[peer][slot]}"
        boxes[peer][slot] = launch
    else:
        if not boxes[rank][slot]:
            return None
        if boxes[rank][slot] != launch:
            return f"rank {rank} takes in launch {launch} what came in launch {boxes[rank][slot]}"
        boxes[rank][slot] = 0 if rules.clears else launch
    after = tuple(at + (who == rank) for who, at in enumerate(positions))
    return after, tuple(tuple(box) for box in boxes), tuple(seen)


def errors_of(exchanging: tuple[bool, ...], rules: Rules) -> set[str]:
    """Everything that can go wrong in any order of two ranks' steps."""
    steps = [steps_of(rank, exchanging, rules) for rank in range(2)]
    start: State = ((0, 0), ((0,) * rules.parities,) * 2, (0, 0))
    found, seen, waiting = set(), {start}, [start]
    while waiting:
        state = waiting.pop()
        unfinished = [rank for rank in range(2) if state[0][rank] < len(steps[rank])]
        stuck = bool(unfinished)
        for rank in unfinished:
            after = moved(state, rank, steps[rank][state[0][rank]], rules)
            if after is None:
                continue
            stuck = False
            if isinstance(after, str):
                found.add(after)
            elif after not in seen:
                seen.add(after)
                waiting.append(after)
        if stuck:
            found.add(f"stuck at {state[0]}")
    return found


PATTERNS = [
    tuple(bool(bits >> launch & 1) for launch in range(6)) for bits in range(64)
]  # every way in which six launches do and do not exchange


@pytest.mark.parametrize("rules", [Rules()], ids=str)
def test_every_order_of_steps_is_right(rules: Rules) -> None:
    for exchanging in PATTERNS:
        assert not errors_of(exchanging, rules), exchanging


@pytest.mark.parametrize(
    "rules",
    [Rules(clears=False), Rules(parities=1), Rules(meets=False)],
    ids=["words are not given back", "one set of words", "a launch ends before the peers have entered it"],
)
def test_planted_errors_are_found(rules: Rules) -> None:
    assert any(errors_of(exchanging, rules) for exchanging in PATTERNS)
