"""The order in which contenders are timed."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from benchmarks.rounds import order_of_round

NAMES = ("cublas", "cublas_nccl", "async_tp", "mkcompile", "mkcompile_push")


def test_every_round_runs_every_contender_once() -> None:
    for index in range(12):
        assert sorted(order_of_round(NAMES, index)) == sorted(NAMES)


def test_ranks_agree_on_the_order() -> None:
    for index in range(12):
        assert order_of_round(NAMES, index) == order_of_round(NAMES, index)


def test_no_contender_stands_behind_the_same_one_in_most_rounds() -> None:
    before: dict[str, Counter[str]] = {name: Counter() for name in NAMES}
    for index in range(9):
        order = order_of_round(NAMES, index)
        for earlier, name in pairwise(order):
            before[name][earlier] += 1
    assert all(counter.most_common(1)[0][1] <= 5 for counter in before.values()), before
