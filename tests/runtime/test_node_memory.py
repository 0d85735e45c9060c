"""Memory that the ranks of a node share: who maps whose, and that all of it is given back. Without a driver."""

from __future__ import annotations

import gc
from typing import cast

import pytest
import torch

from mkcompile.errors import UnsupportedDeviceError, WorkspaceError
from mkcompile.runtime import driver
from mkcompile.runtime.exchange import Exchange
from mkcompile.runtime.node_memory import NodeBacking


class Four:
    """A group of four ranks in which this one is rank 1; the others say what it says, with their own number."""

    rank, world_size = 1, 4

    def gather(self, step: str, value: str) -> tuple[str, ...]:
        return tuple(bytes([rank]).hex() if value else "" for rank in range(4))


class Calls:
    """The driver's calls, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[object, ...]] = []
        self.refused = ""
        for name in ("allocate", "free", "export_memory", "import_memory", "forget_memory"):
            monkeypatch.setattr(driver, name, lambda *given, name=name: self._call(name, *given))

    def _call(self, name: str, *given: object) -> object:
        if name == self.refused:
            raise driver.DriverError(name)
        self.made.append((name, *given))
        if name == "export_memory":
            return b"\1"
        if name == "import_memory":
            return 1000 * (cast(bytes, given[0])[0] + 1)
        return 4096


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def backing(*reached: int) -> NodeBacking:
    return NodeBacking(device=torch.device("cuda", 0), exchange=cast(Exchange, Four()), reached=reached)


def test_the_ranks_of_a_node_map_each_other_and_nobody_else(calls: Calls) -> None:
    one = backing(0, 1)
    buffer = one.connect(one.allocate(1 << 20, 512))
    assert buffer.addresses == (1000, 4096, 0, 0) and buffer.size_bytes == 1 << 20
    assert calls.made[0] == ("allocate", 1 << 20, 512, 0)
    buffer.unmap()
    assert calls.made[-1] == ("forget_memory", 1000, 0), "while the own memory stays"
    buffer.unmap()
    del buffer
    gc.collect()
    assert [name for name, *_ in calls.made].count("forget_memory") == 1
    assert {name for name, *_ in calls.made[-2:]} == {"forget_memory", "free"}


def test_a_rank_alone_on_its_node_shares_nothing(calls: Calls) -> None:
    one = backing(1)
    buffer = one.connect(one.allocate(1 << 20, 0))
    assert buffer.addresses == (0, 4096, 0, 0)
    assert [name for name, *_ in calls.made] == ["allocate"]


@pytest.mark.parametrize(
    ("refused", "error"),
    [("allocate", WorkspaceError), ("export_memory", WorkspaceError), ("import_memory", UnsupportedDeviceError)],
)
def test_what_the_driver_refuses_is_an_error_that_all_ranks_can_be_told(
    calls: Calls, refused: str, error: type[Exception]
) -> None:
    one, calls.refused = backing(0, 1), refused
    with pytest.raises(error):
        one.connect(one.allocate(1 << 20, 0))
    gc.collect()
    names = [name for name, *_ in calls.made]
    assert names.count("free") == names.count("allocate"), "nothing is left behind"
