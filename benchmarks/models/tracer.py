"""The same compiled code on kernels that write their timelines, and back: nothing is compiled by Inductor again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch

from mkcompile.ops import registry
from mkcompile.plan.topology import preset
from mkcompile.runtime import resources, wiring
from mkcompile.runtime.platform import CudaPlatform
from mkcompile.runtime.recorder import Recorder

from .. import by_turns

#: Of each thread: a step of 70B, 4x4096, forward and backward, writes about 2500, and what is overwritten is lost.
_RECORDS = 4096


@dataclass(slots=True)
class Tracer:
    """Of one process; its kernels and its memory are kept from one cell to the next. `platform`: None for CUDA's."""

    platform: CudaPlatform | None = None
    _launcher: registry.Launcher | None = None
    _collectives: torch.library.Library | None = None

    def install(self) -> None:
        """Operator calls are given to kernels of the platform, and collectives go by turns, too; nothing is changed
        where the platform is CUDA's. Collective.
        """
        if self.platform is not None:
            by_turns.plan_as(preset("2xh200"))
            self._collectives = by_turns.install(torch.device("cuda", torch.cuda.current_device()))
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
            with mock.patch.object(resources, "Recorder", partial(Recorder, records=_RECORDS)):
                yield
        finally:
            registry.set_launcher(before)
