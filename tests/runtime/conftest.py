"""A launcher on a machine without GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mkcompile.plan.kernels import AVAILABLE
from mkcompile.runtime import driver, tensor_map
from mkcompile.runtime.exchange import Exchange
from mkcompile.runtime.launcher import Launcher
from mkcompile.runtime.machine import own_basis
from mkcompile.runtime.tactics import Planned
from tests.runtime.fakes import FakeDriver, FakePlatform, lone_group

#: The kernels for many rows with their largest tile, also where few would get others.
PANELS = frozenset(
    f"{name}/128x256x64" if name.startswith(("gemm_all_reduce", "gemm_reduce_scatter")) else name
    for name in AVAILABLE | {"gemm_all_reduce/direct"}
    if not name.endswith("/stream")
)


@pytest.fixture
def fake_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    monkeypatch.setattr(driver, "library", lambda: fake)
    # the peers of a lone group say what this rank says
    monkeypatch.setattr(Exchange, "gather", lambda self, step, value: (value,) * self.world_size)
    tensor_map.encode.cache_clear()
    yield fake
    tensor_map.encode.cache_clear()


@pytest.fixture
def platform() -> FakePlatform:
    return FakePlatform()


@pytest.fixture
def launcher(platform: FakePlatform, fake_driver: FakeDriver) -> Iterator[Launcher]:
    with lone_group() as name:
        assert name == "0"
        yield Launcher(platform, Planned(own_basis, available=PANELS))
