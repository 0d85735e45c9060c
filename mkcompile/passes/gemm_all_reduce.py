"""Finds GEMMs -> all-reduce."""

from __future__ import annotations

from torch import fx

from mkcompile.ops.gemm_all_reduce import GemmAllReduce
from mkcompile.passes.fake_call import problem_of
from mkcompile.passes.gemm import gemms_before
from mkcompile.passes.graph import ALL_REDUCE, is_call
from mkcompile.passes.reason import Why
from mkcompile.passes.reduction import reduction_of
from mkcompile.passes.site import Match, Refusal


def find(collective: fx.Node) -> Match | Refusal | None:
    """A match, or why not; None for other kinds of collective."""
    if not is_call(collective, ALL_REDUCE):
        return None
    reduction = reduction_of(collective)
    if isinstance(reduction, Refusal):
        return reduction
    (source, *_) = collective.args
    gemms = gemms_before(source, [collective], keeps_places=True, result=reduction.wait)  # type: ignore[arg-type]
    if isinstance(gemms, Why):
        return reduction.refuse(gemms)
    call = GemmAllReduce(
        x=list(gemms.x),  # type: ignore[arg-type]
        w=list(gemms.w),  # type: ignore[arg-type]
        bias=gemms.bias,  # type: ignore[arg-type]
        reduce_op=reduction.reduce_op,
        world_size=reduction.world_size,
        group=reduction.group,
        plan_key="",
    )
    return Match(
        call=call,
        outputs=reduction.output(gemms),
        collectives=(collective,),
        problem=problem_of(call),
        covers=gemms.covers,
    )
