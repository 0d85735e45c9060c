"""Gives operator calls to the runtime. Done when mkcompile is imported: a compile cache's hit runs no pass."""

from __future__ import annotations

from mkcompile.config import settings
from mkcompile.ops.registry import set_launcher
from mkcompile.runtime.agree import Agreement
from mkcompile.runtime.dispatch import Dispatch
from mkcompile.runtime.launcher import Launcher
from mkcompile.runtime.machine import own_basis
from mkcompile.runtime.tactics import Planned


def install() -> None:
    """From now on every operator call is agreed on by its group's ranks, and may be taken over by a kernel."""
    agreement = Agreement(settings().timeout_s)
    set_launcher(Dispatch(agreement, Launcher(tactics=Planned(own_basis, agreement))))
