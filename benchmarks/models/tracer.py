"""The same compiled code on kernels that write their timelines, and back: nothing is compiled by Inductor again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mkcompile.ops import registry
from mkcompile.runtime import wiring


@dataclass(slots=True)
class Tracer:
    """Of one process; its kernels and its memory are kept from one cell to the next."""

    _launcher: registry.Launcher | None = None

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Operator calls are given to kernels that are traced. All ranks come here together."""
        before = registry.launcher()
        if self._launcher is None:
            wiring.install(trace=True)
            self._launcher = registry.launcher()
        registry.set_launcher(self._launcher)
        try:
            yield
        finally:
            registry.set_launcher(before)
