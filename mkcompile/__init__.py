"""mkcompile: torch.compile with GEMMs, FFNs and the collectives around them fused.

`torch.compile(model, backend="mkernel")` needs no import of this package.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mkcompile import ops
from mkcompile.config import Options
from mkcompile.errors import OptionError
from mkcompile.runtime.wiring import check, install

if TYPE_CHECKING:
    from mkcompile.backend import FusionPass
    from mkcompile.inspect.explain import explain

__version__ = "0.1.0"
__all__ = ["FusionPass", "Options", "__version__", "check", "explain", "ops"]

# Loaded on first use: they import Inductor, which calls by hand do not need.
_LAZY = {"FusionPass": "mkcompile.backend", "explain": "mkcompile.inspect.explain"}

try:
    install()
except OptionError as error:
    # `python -m mkcompile` is here before its first line: a wrong setting is one line there, as other wrong use is.
    if sys.argv[:1] != ["-m"]:
        raise
    sys.stderr.write(f"OptionError: {error}\n")
    raise SystemExit(2) from error


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'mkcompile' has no attribute {name!r}")
