"""Finds GEMMs -> reduce-scatter along any dimension, plain and scaled."""

from __future__ import annotations

from torch import fx

from mkcompile.ops.gemm_reduce_scatter import GemmReduceScatter, ScaledGemmReduceScatter
from mkcompile.ops.registry import Call
from mkcompile.passes.gemm import Gemms, gemms_before, why_shared
from mkcompile.passes.graph import REDUCE_SCATTER, is_call
from mkcompile.passes.reason import Why
from mkcompile.passes.reduction import Reduction, reduction_of
from mkcompile.passes.scatter import rows_or_columns, scatter_before
from mkcompile.passes.site import Match, Refusal
from mkcompile.passes.sizes import Size


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
    shared = why_shared(scatter.nodes, (collective,))
    if shared is not None:
        return reduction.refuse(shared)
    shape_and_dim = rows_or_columns(scatter, *gemms.shape)
    if isinstance(shape_and_dim, Why):
        return reduction.refuse(shape_and_dim)
    return reduction.match(_call(gemms, shape_and_dim, reduction), gemms, scatter.nodes)


def _call(gemms: Gemms, shape_and_dim: tuple[tuple[Size, ...], int], reduction: Reduction) -> Call:
    shape, dim = shape_and_dim
    end = list(shape), dim, reduction.reduce_op, reduction.world_size, reduction.group, ""
    if not gemms.scales:
        return GemmReduceScatter(list(gemms.x), list(gemms.w), gemms.bias, *end)  # type: ignore[arg-type]
    return ScaledGemmReduceScatter(*gemms.scaled_arguments(), *end)  # type: ignore[arg-type]
