"""How cells are measured, where, and what is known of each contender."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .cells import Cell
from .contenders import Call, Contender
from .overlap import Overlap
from .tracer import Tracer
from .turn import Turn

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How cells are measured. Units: `budget_s` seconds of rounds for each pass of a cell.

    `train`: measure forward with backward, too. `compile_times`: a regular expression for the cells whose contenders
    have caches of their own, and are compiled a second time from them; all others share what Triton has compiled.
    `compiles_only`: nothing else is timed. `profile`: one for the cells whose contenders' steps are looked at with
    torch's profiler, and ours with kernels that write their timelines. Both: None for no cell. `quiet`: no pair
    compiles while another one times, so that every pair should have one cell only. `checks_only`: nothing is timed.
    `together`: one compilation for both modes of a model and size. `options`: of our backend, `variant`: of the
    contender of that name.
    """

    contenders: tuple[str, ...]
    device: str
    budget_s: float
    train: bool
    compile_times: str | None
    profile: str | None
    quiet: bool
    compiles_only: bool = False
    checks_only: bool = False
    together: bool = False
    options: dict[str, str] = field(default_factory=dict)
    variant: dict[str, str] = field(default_factory=dict)

    def looks_at(self, cell: Cell) -> bool:
        """Is a step of its contenders profiled?"""
        return self.profile is not None and re.search(self.profile, str(cell)) is not None

    def times_compiling(self, cell: Cell) -> bool:
        """Is it noted what compiling takes, cold and warm?"""
        return self.compile_times is not None and re.search(self.compile_times, str(cell)) is not None

    @property
    def times(self) -> bool:
        """Is a step timed?"""
        return not (self.compiles_only or self.checks_only)


@dataclass(slots=True)
class Entry:
    """A contender with what became of it. `skips`: graphs of its compilations that can't be CUDA graphs. `seen`: what
    the profiler showed of a step of each pass.
    """

    contender: Contender
    call: Call
    row: Row = field(default_factory=dict)
    skips: int = 0
    seen: dict[str, Overlap] = field(default_factory=dict)

    @property
    def works(self) -> bool:
        """Has it come this far without an error, and been right?"""
        return "error" not in self.row


@dataclass(frozen=True, slots=True)
class Truth:
    """What a pass should give, and how far eager's values are from it: None where they are what it should give."""

    values: dict[str, Tensor]
    of_eager: dict[str, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a cell is run, and who hears of it: `say` of each step, `publish` of rows as soon as there are some.

    `cache`: a folder for what is compiled, None for the user's. `apart`: one of this run only, for contenders with
    caches of their own.
    """

    mesh: DeviceMesh
    turn: Turn
    tracer: Tracer
    cache: Path | None
    apart: Path
    say: Callable[[str], None]
    publish: Callable[[list[Row]], None]
