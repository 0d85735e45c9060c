"""What all-reduce and reduce-scatter sites have in common: group, operation, and the wait that ends the collective."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from mkcompile.ops.registry import Call
from mkcompile.passes.fake_call import problem_of
from mkcompile.passes.gemm import Gemms
from mkcompile.passes.graph import WAIT, is_call, world_size_of
from mkcompile.passes.reason import Reason, Why
from mkcompile.passes.site import Match, Output, Refusal

REDUCE_OPS = ("sum", "avg")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """A reducing collective that an operator may replace: everything about it but its input."""

    collective: fx.Node
    wait: fx.Node
    reduce_op: str
    world_size: int
    group: str

    def match(self, call: Call, gemms: Gemms, between: tuple[fx.Node, ...] = ()) -> Match:
        """The site of an operator with a single result, the wait; `between` stands between GEMMs and collective."""
        return Match(
            call=call,
            outputs=(Output(node=self.wait, index=None, after=gemms.after),),
            collectives=(self.collective,),
            problem=problem_of(call),
            covers=(*gemms.covers, *between),
        )

    def refuse(self, why: Why) -> Refusal:
        """The refusal of this collective."""
        return Refusal(collective=self.collective, reason=why.reason, detail=why.detail)


def reduction_of(collective: fx.Node) -> Reduction | Refusal:
    """The reduction that `all_reduce(x, op, group)` or `reduce_scatter_tensor(x, op, world_size, group)` performs."""
    reduce_op, group = collective.args[1], collective.args[-1]
    if not isinstance(group, str):
        return Refusal(collective=collective, reason=Reason.GROUP_IS_NODE)
    if reduce_op not in REDUCE_OPS:
        return Refusal(collective=collective, reason=Reason.REDUCE_OP, detail=str(reduce_op))
    world_size = world_size_of(group)
    if world_size == 1:
        return Refusal(collective=collective, reason=Reason.WORLD_SIZE_ONE, detail=group)
    readers = list(collective.users)
    if not any(user.users for user in readers):
        return Refusal(collective=collective, reason=Reason.RESULT_UNUSED)
    if len(readers) != 1 or not is_call(readers[0], WAIT):
        return Refusal(collective=collective, reason=Reason.USED_BEFORE_WAIT, detail=readers[0].name)
    return Reduction(
        collective=collective, wait=readers[0], reduce_op=str(reduce_op), world_size=world_size, group=group
    )
