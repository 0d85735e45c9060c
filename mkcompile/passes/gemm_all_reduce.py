"""Finds GEMM -> all-reduce."""

from __future__ import annotations

from typing import Any

from torch import fx

from mkcompile.ops.gemm_all_reduce import GemmAllReduce
from mkcompile.passes.fake_call import problem_of
from mkcompile.passes.graph import ALL_REDUCE, GEMMS, VIEWS, WAIT, aten, is_call, only_user, value
from mkcompile.passes.reason import Reason
from mkcompile.passes.site import Match, Output, Refusal


def find(collective: fx.Node) -> Match | Refusal | None:
    """A match, or why not; None for other kinds of collective."""
    if not is_call(collective, ALL_REDUCE):
        return None
    source, reduce_op, group = collective.args[:3]
    assert isinstance(source, fx.Node)
    if not isinstance(group, str):
        return Refusal(collective=collective, reason=Reason.GROUP_IS_NODE)
    if reduce_op not in ("sum", "avg"):
        return Refusal(collective=collective, reason=Reason.REDUCE_OP, detail=str(reduce_op))
    wait = only_user(collective)
    product: Any = source
    while is_call(product, VIEWS) and len(product.users) == 1:
        product = product.args[0]
    if not is_call(product, GEMMS) or wait is None or not is_call(wait, WAIT):
        return Refusal(collective=collective, reason=Reason.NO_GEMM)
    if len(product.users) > 1:
        return Refusal(collective=collective, reason=Reason.PRODUCT_USED_ELSEWHERE, detail=product.name)
    bias, x, w = (None, *product.args) if product.target is aten.mm.default else product.args
    from torch.distributed.distributed_c10d import _resolve_process_group

    call = GemmAllReduce([x], [w], bias, str(reduce_op), _resolve_process_group(group).size(), group, "")
    return Match(
        call=call, outputs=(Output(node=wait, index=None),), collectives=(collective,), problem=problem_of(call)
    )
