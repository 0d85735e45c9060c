"""What each fused operator means: schema, shapes, reference, size. One module an operator, found by name.

The functions `gemm_all_reduce`, ... are for calls by hand, outside `torch.compile`; graphs call `torch.ops.mkcompile.*`.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

_SUPPORT = ("checks", "collectives", "problem", "registry", "by_hand")

OPERATOR_MODULES = tuple(
    info.name for info in iter_modules(__path__) if info.name not in _SUPPORT and not info.name.startswith("_")
)
for _name in OPERATOR_MODULES:
    import_module(f"{__name__}.{_name}")
