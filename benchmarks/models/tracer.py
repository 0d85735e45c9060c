"""The same compiled code on kernels that write their timelines, and back: nothing is compiled by Inductor again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from mkcompile.ops import registry
from mkcompile.plan.topology import preset
from mkcompile.runtime import machine, wiring
from mkcompile.runtime.exchange import Exchange
from mkcompile.runtime.platform import CudaPlatform
from mkcompile.runtime.probe import Survey


class SharedPlatform(CudaPlatform):
    """Ranks on one GPU, which the driver lets run by turns: refused outside of trials."""

    def survey(self, exchange: Exchange, device: torch.device) -> Survey:
        """Collective."""
        found = super().survey(exchange, device)
        return replace(found, obstacle="") if "share a GPU" in found.obstacle else found


@dataclass(slots=True)
class Tracer:
    """Of one process; its kernels and its memory are kept from one cell to the next. `platform`: None for CUDA's."""

    platform: CudaPlatform | None = None
    _launcher: registry.Launcher | None = None

    def install(self) -> None:
        """Operator calls are given to kernels of the platform, which is planned as if each rank had a GPU of its own;
        nothing is changed where that is CUDA's.
        """
        if self.platform is not None:
            machine._machine = lambda world_size: preset("2xh200")  # type: ignore[assignment]
            wiring.install(platform=self.platform)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Operator calls are given to kernels that are traced. All ranks come here together."""
        before = registry.launcher()
        if self._launcher is None:
            wiring.install(trace=True, platform=self.platform)
            self._launcher = registry.launcher()
        registry.set_launcher(self._launcher)
        try:
            yield
        finally:
            registry.set_launcher(before)
