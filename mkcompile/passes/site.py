"""What finders return: a `Match` or a `Refusal` for a collective, and the plain report that outlives the graph."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from mkcompile.ops.problem import Problem
from mkcompile.ops.registry import Call
from mkcompile.passes.reason import Reason, Residual


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """An old node that the fused operator computes: its result number `index`, read as the old node's shape.

    `index` is None for operators that return a single tensor. `after` are unary nodes (argument 0 is their input) that
    are applied again to the result, in order: scalings and permutes that were moved behind a reduction.
    """

    node: fx.Node
    index: int | None
    after: tuple[fx.Node, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A site that can be fused.

    `call` is the operator's call with graph nodes in the places of tensors (and of symbolic sizes); `collectives` are
    the collective nodes that it covers; `problem` comes from the nodes' fake values. `covers` are further nodes that
    the operator computes (its GEMMs, activations): two matches that would compute one node twice exclude each other.
    Symbolic sizes in `call` may be given as they are (SymInt); the rewrite finds or makes the nodes that hold them.
    """

    call: Call
    outputs: tuple[Output, ...]
    collectives: tuple[fx.Node, ...]
    problem: Problem
    covers: tuple[fx.Node, ...] = ()

    @property
    def claims(self) -> set[fx.Node]:
        """All nodes that only one site may compute."""
        return {*self.collectives, *self.covers, *(output.node for output in self.outputs)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A collective that stays as it is. `detail` names the node or size that decided it.

    `problem` is that of a match that could have been fused and was decided against.
    """

    collective: fx.Node
    reason: Reason
    detail: str = ""
    problem: Problem | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What became of one collective, with nothing of the graph in it.

    `operator` is the fused operator's name, or None with a `reason`. `problem` is None where no form matched.
    `residual`: what became of the addition behind a fused reduction, None where there is none.
    """

    collective: str
    kind: str
    group: str
    shape: tuple[str, ...]
    operator: str | None = None
    reason: Reason | None = None
    detail: str = ""
    problem: Problem | None = None
    residual: Residual | None = None
