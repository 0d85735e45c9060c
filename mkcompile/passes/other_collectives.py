"""Collectives that no finder looks at: why they stay."""

from __future__ import annotations

from typing import Any

from torch import fx

from mkcompile.passes.graph import ALL_TO_ALL, is_call
from mkcompile.passes.reason import Reason
from mkcompile.passes.site import Refusal


def refusal_of(collective: fx.Node) -> Refusal:
    """Why a collective of another kind is left alone.

    An exchange whose ranks send different amounts is told apart, since its graph is another one on each rank: what is
    the same everywhere are its sizes' being unequal (a step of a ring) or unknown (tokens on their way to experts).
    """
    if is_call(collective, ALL_TO_ALL) and not all(_equal(sizes) for sizes in collective.args[1:3]):
        return Refusal(collective=collective, reason=Reason.RANKS_DIFFER)
    kind = getattr(collective.target, "_opname", str(collective.target))
    return Refusal(collective=collective, reason=Reason.COLLECTIVE_KIND, detail=kind)


def _equal(sizes: Any) -> bool:
    return all(isinstance(one, int) for one in sizes) and len(set(sizes)) == 1
