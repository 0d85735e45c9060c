"""Gives operator calls to the runtime. Done when mkcompile is imported: a compile cache's hit runs no pass."""

from __future__ import annotations

from mkcompile.config import settings
from mkcompile.ops.registry import set_launcher
from mkcompile.runtime.agree import Agreement
from mkcompile.runtime.dispatch import Dispatch
from mkcompile.runtime.launcher import Launcher


def install() -> None:
    """From now on every operator call is agreed on by its group's ranks, and may be taken over by a kernel."""
    set_launcher(Dispatch(Agreement(settings().timeout_s), Launcher()))
