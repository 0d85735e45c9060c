"""Finds all-gather -> GEMMs, plain and scaled.

Legend: g [M, K] the gathered tensor as its GEMMs read it, w the other operand of a GEMM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from mkcompile.ops.all_gather_gemm import (
    FORM_INPUT,
    FORM_TRANSPOSED,
    FORM_WEIGHT,
    FORM_WEIGHT_TRANSPOSED,
    AllGatherGemm,
    AllGatherScaledGemm,
)
from mkcompile.ops.registry import Call
from mkcompile.passes.fake_call import problem_of
from mkcompile.passes.gather import CATS, PADS, SLICES, SPLITS, Gather, gather_of
from mkcompile.passes.gemm import OTHER_GEMMS, Product, Scales, product
from mkcompile.passes.graph import (
    CAST,
    GEMMS,
    SCALED_GEMMS,
    VIEWS,
    argument,
    aten,
    is_call,
    only_user,
    peel,
    shape_of,
    value,
)
from mkcompile.passes.reason import Reason, Why
from mkcompile.passes.site import Match, Output, Refusal
from mkcompile.passes.sizes import Size, same_shape, same_size

TRANSPOSES = (aten.permute.default,)
SEARCH_STEPS = 8
# Inductor moves some elementwise operations from behind a `cat` to its pieces, so the pieces are followed too.
_RELAYOUTS = (*VIEWS, *SPLITS, getitem, *CATS, aten.expand.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A GEMM that reads g in one of the operator's forms. `output` is its node, or the addition of a bias to it.

    `kind` is what the products of one call have in common; with `scales` they are scaled ones.
    """

    gemm: fx.Node
    form: int
    g: fx.Node
    w: fx.Node
    bias: fx.Node | None
    output: fx.Node
    covers: tuple[fx.Node, ...]
    kind: tuple[torch.dtype, bool | None]
    scales: Scales | None

    @property
    def others(self) -> tuple[fx.Node, ...]:
        """Everything that the product reads besides g."""
        scales = (self.scales.x, self.scales.w) if self.scales else ()
        return (self.w, *scales) if self.bias is None else (self.w, *scales, self.bias)


def find(collective: fx.Node) -> Match | Refusal | None:
    """A match, or why not; None for other kinds of collective."""
    gather = gather_of(collective)
    if gather is None:
        return None
    found = gather if isinstance(gather, Why) else _match(gather)
    return Refusal(collective=collective, reason=found.reason, detail=found.detail) if isinstance(found, Why) else found


def _match(gather: Gather) -> Match | Why:
    candidates = list(readers(gather))
    usable = [one for one in candidates if isinstance(one, Reader)]
    if is_parameter(gather, usable):
        return Why(reason=Reason.PARAMETER_GATHER, detail=gather.source.name)
    free = [one for one in usable if not any(_made_from(x, gather) for x in one.others)]
    found = next(((one.kind, read) for one in free if (read := read_as(gather, shape_of(one.g)[-1]))), None)
    if found is None:
        return _why_none(gather, usable, free, [one for one in candidates if isinstance(one, Why)])
    kind, read = found
    chosen = [one for one in free if one.kind == kind and read_as(gather, shape_of(one.g)[-1]) == read]
    returns_gathered = used_beside(gather, {one.gemm for one in chosen})
    call = _call(gather, read, chosen, returns_gathered)
    outputs = [Output(node=one.output, index=i) for i, one in enumerate(chosen)]
    if returns_gathered:
        outputs.append(Output(node=gather.root, index=len(chosen)))
    return Match(
        call=call,
        outputs=tuple(outputs),
        collectives=(gather.collective,),
        problem=problem_of(call),
        covers=tuple(node for one in chosen for node in one.covers),
    )


def _call(gather: Gather, read: tuple[fx.Node, int], chosen: Sequence[Reader], returns_gathered: bool) -> Call:
    source: Any = read[0]
    w: Any = [one.w for one in chosen]
    bias: Any = [one.bias for one in chosen]
    end = read[1], returns_gathered, gather.world_size, gather.group, ""
    x_scale: Any = [one.scales.x for one in chosen if one.scales]
    if not x_scale:
        return AllGatherGemm(source, w, bias, [one.form for one in chosen], *end)
    w_scale: Any = [one.scales.w for one in chosen if one.scales]
    dtype, fast_accum = chosen[0].kind
    return AllGatherScaledGemm(source, w, x_scale, w_scale, bias, dtype, bool(fast_accum), *end)


def readers(gather: Gather) -> Iterator[Reader | Why]:
    """The GEMMs that read the gathered tensor, in graph order; a Why for each one that no form fits."""
    found: dict[fx.Node, Reader | Why] = {}
    for alias in gather.aliases:
        for gemm, g in _gemms_of(alias):
            found[gemm] = _reader(gemm, g, alias)
    return (found[gemm] for gemm in sorted(found))


def read_as(gather: Gather, columns: Size) -> tuple[fx.Node, int] | None:
    """The tensor to gather and the dimension, so that the result's last dimension is `columns`.

    It is the gather's source, or a tensor that the source is a view of: heads that were split off before the gather
    and joined after it need not be split off.
    """
    for dim in gather.dims:
        if same_size(gather.shape(dim)[-1], columns):
            return gather.source, dim
    dim, source, shape = gather.dims[0], gather.source, shape_of(gather.source)
    while is_call(source, VIEWS):
        source = source.args[0]  # type: ignore[assignment]
        behind = shape_of(source)
        in_order = dim == 0 or same_shape(behind[: dim + 1], shape[: dim + 1])
        if in_order and dim < len(behind) - 1 and same_size(behind[-1], columns):
            return source, dim
    return None


def used_beside(gather: Gather, inside: set[fx.Node]) -> bool:
    """Does anything but the nodes `inside` need the gathered tensor?"""
    nodes = [*gather.aliases, *(user for alias in gather.aliases for user in alias.users if _transposes(user, alias))]
    known = inside.union(nodes)
    return any(user not in known for node in nodes for user in node.users)


def is_parameter(gather: Gather, found: list[Reader]) -> bool:
    """Is it a parameter that is gathered, rather than an activation?

    A graph does not say which of its inputs are parameters. A shard from torch's FSDP operators is one, and so is a
    graph input (views and casts of it included) whose gathered form is the weight of a GEMM.
    """
    source = peel(gather.source, (*VIEWS, *CAST, *TRANSPOSES, getitem))
    if isinstance(source.target, torch._ops.OpOverload) and source.target.namespace == "fsdp":
        return True
    # saved activations keep the names of the forward graph's nodes
    is_input = source.op == "placeholder" and source.name.startswith(("primals_", "arg"))
    return is_input and any(one.form in (FORM_WEIGHT, FORM_WEIGHT_TRANSPOSED) for one in found)


def bias_after(found: Product) -> tuple[fx.Node, fx.Node, tuple[fx.Node, ...]] | None:
    """The bias that is added to a product by hand: the bias, the addition, and the views before it."""
    node, views = found.node, []
    user = only_user(node)
    while user is not None and is_call(user, VIEWS):
        views.append(user)
        node, user = user, only_user(user)
    if user is None or not is_call(user, (aten.add.Tensor,)) or argument(user, 2, "alpha", 1) != 1:
        return None
    left, right = user.args[:2]
    other = right if left is node else left
    if not isinstance(other, fx.Node) or other is node:
        return None
    bias, columns = peel(other), shape_of(found.node)[-1]
    is_bias = same_shape(shape_of(bias), (columns,)) and same_size(shape_of(other)[-1], columns)
    # a bias of another dtype would make a sum of that one, which no product with a bias gives
    is_alike = value(found.node).dtype == value(bias).dtype == value(user).dtype
    if not (is_bias and is_alike and same_size(shape_of(node)[-1], columns)):
        return None
    return bias, user, tuple(views)


def _gemms_of(alias: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each GEMM that reads the alias, with the operand: the alias or its transpose."""
    for user in alias.users:
        if is_call(user, (*GEMMS, *SCALED_GEMMS, *OTHER_GEMMS)):
            yield user, alias
        elif _transposes(user, alias):
            yield from ((gemm, user) for gemm in user.users if is_call(gemm, (*GEMMS, *SCALED_GEMMS)))


def _transposes(node: fx.Node, alias: fx.Node) -> bool:
    return is_call(node, TRANSPOSES) and len(shape_of(alias)) == 2 and node.args[1] == [1, 0]


def _reader(gemm: fx.Node, operand: fx.Node, alias: fx.Node) -> Reader | Why:
    found = product(gemm)
    if isinstance(found, Why):
        return found
    transposed = operand is not alias
    if found.scales is not None and (transposed or found.x is not operand):
        is_scale = operand in (found.scales.x, found.scales.w)
        return Why(reason=Reason.SCALES_GATHERED if is_scale else Reason.GEMM_KIND, detail=gemm.name)
    if found.x is operand:
        form, w = (FORM_TRANSPOSED if transposed else FORM_INPUT), found.w
    elif found.w is operand:
        form, w = (FORM_WEIGHT_TRANSPOSED if transposed else FORM_WEIGHT), found.x
    else:
        return Why(reason=Reason.BIAS_SHAPE, detail=gemm.name)
    if found.bias is not None and form != FORM_INPUT:
        return Why(reason=Reason.BIAS_SHAPE, detail=gemm.name)
    by_hand = bias_after(found) if found.bias is None and form == FORM_INPUT else None
    bias, output, views = by_hand or (found.bias, gemm, ())
    covers = (gemm,) if by_hand is None else (gemm, *views, output)
    kind, scales = found.kind, found.scales
    return Reader(gemm=gemm, form=form, g=alias, w=w, bias=bias, output=output, covers=covers, kind=kind, scales=scales)


def _made_from(node: fx.Node, gather: Gather) -> bool:
    """Does the node depend on the gathered tensor?"""
    seen, pending = {node}, [node]
    while pending:
        current = pending.pop()
        if current is gather.collective:
            return True
        for one in current.all_input_nodes:
            if one not in seen and one >= gather.collective:
                seen.add(one)
                pending.append(one)
    return False


def _why_none(gather: Gather, usable: list[Reader], free: list[Reader], whys: list[Why]) -> Why:
    """Why no GEMM can be fused with the gather."""
    if free:
        return Why(reason=Reason.GATHER_REGROUPED, detail=f"{free[0].g.name} {tuple(shape_of(free[0].g))}")
    if usable:
        return Why(reason=Reason.DEPENDENT_GEMMS, detail=usable[0].gemm.name)
    if whys:
        return whys[0]
    why = _gemm_beyond(gather)
    if why is not None:
        return why
    if is_call(peel(gather.source), GEMMS):
        return Why(reason=Reason.GEMM_BEFORE_GATHER, detail=peel(gather.source).name)
    return Why(reason=Reason.NO_GEMM, detail=", ".join(user.name for user in gather.aliases[-1].users))


def _gemm_beyond(gather: Gather) -> Why | None:
    """What stands between the gathered tensor and a GEMM a few elementwise steps further on."""
    pending: list[tuple[fx.Node, Why | None, int]] = [(alias, None, SEARCH_STEPS) for alias in gather.aliases]
    seen = set(gather.aliases)
    while pending:
        node, why, steps = pending.pop()
        for user in node.users:
            if is_call(user, (*GEMMS, *SCALED_GEMMS, *OTHER_GEMMS)) and why is not None:
                return why
            if steps and user not in seen and _is_step(user):
                seen.add(user)
                pending.append((user, why or _why_between(user, gather), steps - 1))
    return None


def _is_step(node: fx.Node) -> bool:
    if is_call(node, (*_RELAYOUTS, *TRANSPOSES, *SLICES, *PADS, *CAST)):
        return True
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def _why_between(node: fx.Node, gather: Gather) -> Why | None:
    if is_call(node, _RELAYOUTS):
        return None
    if is_call(node, (*SLICES, *PADS)):
        is_shard = same_shape(shape_of(node), shape_of(gather.source))
        return None if is_shard else Why(reason=Reason.UNEVEN_GATHER, detail=node.name)
    return Why(reason=Reason.OP_BEFORE_GEMM, detail=node.name)
