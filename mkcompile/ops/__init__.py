"""What each fused operator means: schema, shapes, reference, size. One module an operator, found by name.

Graphs call `torch.ops.mkcompile.<operator>`; `mkcompile.ops.<operator>(..)` is for calls by hand. The public function
has its module's name and takes its place here, so `from mkcompile.ops.<operator> import ..` reaches the rest of it.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

_SUPPORT = ("by_hand", "checks", "collectives", "groups", "problem", "registry")

OPERATOR_MODULES = tuple(
    info.name for info in iter_modules(__path__) if info.name not in _SUPPORT and not info.name.startswith("_")
)
for _name in OPERATOR_MODULES:
    globals()[_name] = getattr(import_module(f"{__name__}.{_name}"), _name)
