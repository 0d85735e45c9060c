"""Which network carries fused kernels between nodes, by the settings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mkcompile.config import settings
from mkcompile.errors import OptionError
from mkcompile.runtime import network_choice
from mkcompile.runtime.network_choice import proxy_config, transport_of_kernels
from mkcompile.runtime.proxy.trial import Trial


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    settings.cache_clear()
    network_choice._best.cache_clear()
    yield
    settings.cache_clear()
    network_choice._best.cache_clear()


@pytest.mark.parametrize(
    ("has", "expected"), [(("srd", "rc", "tcp"), "srd"), (("rc", "tcp"), "rc"), (("tcp",), "")], ids=str
)
def test_by_itself_only_rdma_is_taken(monkeypatch: pytest.MonkeyPatch, has: tuple[str, ...], expected: str) -> None:
    monkeypatch.delenv("MKCOMPILE_NETWORK", raising=False)
    monkeypatch.setattr(
        network_choice, "try_transport", lambda name: Trial(transport=name, problem="" if name in has else "no device")
    )
    assert transport_of_kernels(True) == expected
    assert transport_of_kernels(False) == "", "nothing is opened for a single node"


@pytest.mark.parametrize(
    ("given", "transport", "device"), [("tcp", "tcp", ""), ("tcp:eth1", "tcp", "eth1"), ("rc:mlx5_0", "rc", "mlx5_0")]
)
def test_what_is_named_is_taken(monkeypatch: pytest.MonkeyPatch, given: str, transport: str, device: str) -> None:
    monkeypatch.setenv("MKCOMPILE_NETWORK", given)
    assert transport_of_kernels(False) == transport
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
