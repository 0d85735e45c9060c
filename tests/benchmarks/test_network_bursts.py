"""What rows of benchmarks over nodes say of proxies."""

from __future__ import annotations

from benchmarks.network_bursts import proxy_work
from mkcompile.runtime.proxy.abi import COUNTERS


def test_work_of_a_proxy_is_what_its_counters_grew_by() -> None:
    before = {name: 10 * place for place, name in enumerate(COUNTERS)}
    after = {name: value + place for place, (name, value) in enumerate(before.items())}
    work = proxy_work(before, after)
    assert work == {name: COUNTERS.index(name) for name in ("commands", "batches", "rounds", "stalls")}
