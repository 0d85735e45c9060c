"""Finds GEMMs -> reduce-scatter along any dimension."""

from __future__ import annotations

from torch import fx

from mkcompile.ops.gemm_reduce_scatter import GemmReduceScatter
from mkcompile.passes.fake_call import problem_of
from mkcompile.passes.gemm import gemms_before
from mkcompile.passes.graph import REDUCE_SCATTER, is_call
from mkcompile.passes.reason import Why
from mkcompile.passes.reduction import reduction_of
from mkcompile.passes.scatter import rows_or_columns, scatter_before
from mkcompile.passes.site import Match, Refusal


def find(collective: fx.Node) -> Match | Refusal | None:
    """A match, or why not; None for other kinds of collective."""
    if not is_call(collective, REDUCE_SCATTER):
        return None
    reduction = reduction_of(collective)
    if isinstance(reduction, Refusal):
        return reduction
    scatter = scatter_before(collective)
    if isinstance(scatter, Why):
        return reduction.refuse(scatter)
    gemms = gemms_before(scatter.source, scatter.readers, result=reduction.wait)
    if isinstance(gemms, Why):
        return reduction.refuse(gemms)
    shape_and_dim = rows_or_columns(scatter, *gemms.shape)
    if isinstance(shape_and_dim, Why):
        return reduction.refuse(shape_and_dim)
    shape, dim = shape_and_dim
    call = GemmReduceScatter(
        x=list(gemms.x),  # type: ignore[arg-type]
        w=list(gemms.w),  # type: ignore[arg-type]
        bias=gemms.bias,  # type: ignore[arg-type]
        shape=list(shape),  # type: ignore[arg-type]
        dim=dim,
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
        covers=(*gemms.covers, *scatter.nodes),
    )
