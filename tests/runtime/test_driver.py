"""The driver's calls where one of several fails: nothing is left behind. Without a driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from mkcompile.runtime import driver


@dataclass
class Library:
    """Every call succeeds but the one that is `refused`; `held` is the memory that was not freed."""

    refused: str = ""
    held: list[int] = field(default_factory=list)

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*given: Any) -> int:
            if name == self.refused:
                return 2
            if name == "cuMemAlloc_v2":
                given[0]._obj.value = 4096
                self.held.append(4096)
            if name == "cuMemFree_v2":
                self.held.remove(given[0].value)
            if name == "cuGetErrorString":
                given[1]._obj.value = b"out of memory"
            return 0

        return call


@pytest.mark.parametrize("refused", ["cuStreamCreate", "cuMemsetD8Async", "cuStreamSynchronize"])
def test_memory_that_can_not_be_made_ready_is_freed(monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    library = Library(refused)
    monkeypatch.setattr(driver, "library", lambda: library)
    with pytest.raises(driver.DriverError, match="out of memory"):
        driver.allocate(1 << 20, 512, 0)
    assert library.held == []


def test_memory_that_was_allocated_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(driver, "library", lambda: library)
    assert driver.allocate(1 << 20, 512, 0) == 4096 == library.held[0]
    driver.free(4096, 0)
    assert library.held == []
