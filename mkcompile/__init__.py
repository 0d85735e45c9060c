"""mkcompile: torch.compile with GEMMs, FFNs and the collectives around them fused.

`torch.compile(model, backend="mkernel")` needs no import of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkcompile.passes.fusion_pass import FusionPass

__version__ = "0.1.0"
__all__ = ["FusionPass", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "FusionPass":
        from mkcompile.passes.fusion_pass import FusionPass

        return FusionPass
    raise AttributeError(f"module 'mkcompile' has no attribute {name!r}")
