"""Which network carries fused kernels between nodes, by the settings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mkcompile.config import settings
from mkcompile.errors import OptionError
from mkcompile.runtime.network_choice import TCP_GBPS, has_queues, network_gbps, proxy_config, transport_of_kernels


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    settings.cache_clear()
    yield
    settings.cache_clear()


def test_nothing_is_taken_that_was_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MKCOMPILE_NETWORK", raising=False)
    assert transport_of_kernels() == ""


@pytest.mark.parametrize(("transport", "queues", "usable"), [("tcp", 8, False), ("tcp", 32, True), ("rc", 8, False)])
def test_proxies_that_copy_need_queues(transport: str, queues: int, usable: bool) -> None:
    assert has_queues(transport, queues) is usable


@pytest.mark.parametrize(
    ("given", "transport", "device"), [("tcp", "tcp", ""), ("tcp:eth1", "tcp", "eth1"), ("rc:mlx5_0", "rc", "mlx5_0")]
)
def test_what_is_named_is_taken(monkeypatch: pytest.MonkeyPatch, given: str, transport: str, device: str) -> None:
    monkeypatch.setenv("MKCOMPILE_NETWORK", given)
    assert transport_of_kernels() == transport
    config = proxy_config(transport)
    assert (config.transport, config.device) == (transport, device)


def test_the_emulated_link_takes_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKCOMPILE_NETWORK", "emulated:50")
    link = proxy_config("emulated").link
    assert (link.bandwidth_gbps, link.latency_us) == (50.0, 5.0)
    settings.cache_clear()
    monkeypatch.setenv("MKCOMPILE_NETWORK", "emulated:fast")
    with pytest.raises(OptionError, match="GB/s"):
        proxy_config("emulated")


@pytest.mark.parametrize(
    ("given", "gbps"), [("auto", 0.0), ("tcp", TCP_GBPS), ("emulated", 0.0), ("emulated:25", 25.0), ("rc:no_such", 0.0)]
)
def test_the_planner_is_told_the_networks_rate(monkeypatch: pytest.MonkeyPatch, given: str, gbps: float) -> None:
    """0: not known."""
    monkeypatch.setenv("MKCOMPILE_NETWORK", given)
    assert network_gbps(transport_of_kernels()) == gbps
