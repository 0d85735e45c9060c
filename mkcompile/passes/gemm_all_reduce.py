"""Finds GEMMs -> all-reduce, plain and scaled."""

from __future__ import annotations

from torch import fx

from mkcompile.ops.gemm_all_reduce import GemmAllReduce, ScaledGemmAllReduce
from mkcompile.ops.registry import Call
from mkcompile.passes.gemm import Gemms, gemms_before
from mkcompile.passes.graph import ALL_REDUCE, is_call
from mkcompile.passes.reason import Why
from mkcompile.passes.reduction import Reduction, reduction_of
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
    return reduction.match(_call(gemms, reduction), gemms)


def _call(gemms: Gemms, reduction: Reduction) -> Call:
    end = reduction.reduce_op, reduction.world_size, reduction.group, ""
    if not gemms.scales:
        return GemmAllReduce(list(gemms.x), list(gemms.w), gemms.bias, *end)  # type: ignore[arg-type]
    return ScaledGemmAllReduce(*gemms.scaled_arguments(), *end)
