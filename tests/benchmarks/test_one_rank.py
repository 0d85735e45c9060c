"""The rank that is its own peer: what of it needs no GPU."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks import one_rank
from mkcompile.runtime import sources
from mkcompile.runtime.kernel_config import KernelConfig


class _Contender:
    """Says when it was told to expect its peer, and when it was timed."""

    def __init__(self, name: str, events: list[tuple[str, str]]) -> None:
        self.name, self.events = name, events

    def expect(self) -> None:
        self.events.append((self.name, "expects"))

    def __call__(self) -> None:
        raise AssertionError("only timed")


def test_one_line_of_the_sources_differs() -> None:
    changed = {name for name, text in one_rank.headers().items() if text != sources.headers()[name]}
    assert changed == {"device/sync.cuh"}


def test_every_round_times_all_and_the_first_one_only_warms(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, str]] = []
    contenders = {name: _Contender(name, events) for name in ("old", "new")}

    def timed(call: object, num_calls: int, backlog_cycles: int) -> float:
        events.append((getattr(call, "name", "cublas"), "timed"))
        return float(len(events))

    monkeypatch.setattr(one_rank, "timed_ms", timed)
    samples = one_rank.samples_ms(contenders, lambda: None, flop=10**12, rounds=3)  # type: ignore[arg-type]
    assert {name: len(values) for name, values in samples.items()} == {"cublas": 3, "old": 3, "new": 3}
    timed_names = [name for name, what in events if what == "timed"]
    assert all(Counter(timed_names[at : at + 3]) == Counter(("cublas", "old", "new")) for at in range(0, 12, 3))
    for index, (name, what) in enumerate(events):
        if what == "timed" and name != "cublas":
            assert events[index - 1] == (name, "expects")


@pytest.mark.parametrize("base", one_rank.OPERATORS, ids=lambda config: config.name)
def test_launches_are_those_of_the_planner_and_fit(base: KernelConfig) -> None:
    for shape in one_rank.SHAPES:
        config, schedule = one_rank.tactic_of(base, shape)
        assert config.broadcast == base.broadcast and not config.streams
        assert schedule.grid <= (128 if config.reduces else 132)
