"""All finders, by operator name: every module of this package that is named as an operator."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules

from torch import fx

from mkcompile import passes
from mkcompile.ops import OPERATOR_MODULES
from mkcompile.passes.site import Match, Refusal

Finder = Callable[[fx.Node], Match | Refusal | None]


def finders() -> dict[str, Finder]:
    """The finder of each operator that has one."""
    present = {info.name for info in iter_modules(passes.__path__)}
    return {name: import_module(f"mkcompile.passes.{name}").find for name in OPERATOR_MODULES if name in present}
