"""Graph breaks: where the compiler gave up, and whether a GEMM lost its collective there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch._dynamo.output_graph import GraphCompileReason
from torch._dynamo.utils import graph_break_reasons

_COLLECTIVE = re.compile(
    r"all_reduce|all_gather|reduce_scatter|all_to_all|async_op|\bdist\.|funcol\.|_functional_coll|class `\w*Work`"
)
_GEMM_NAMES = {"linear", "matmul", "mm", "addmm", "bmm", "einsum"}
_VIEW_NAMES = {
    "view",
    "reshape",
    "transpose",
    "permute",
    "contiguous",
    "flatten",
    "unsqueeze",
    "squeeze",
    "to",
    "chunk",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBreak:
    """One place in the user's code where the graph ends early.

    `gemm` names the GEMM whose result leaves the graph there; empty if there is none.
    """

    file: str
    line: int
    function: str
    code: str
    reason: str
    gemm: str = ""

    @property
    def at_collective(self) -> bool:
        """Is the line, or the compiler's reason, about a collective?"""
        return bool(_COLLECTIVE.search(self.code) or _COLLECTIVE.search(self.reason))

    @property
    def where(self) -> str:
        """`file:line`."""
        return f"{self.file}:{self.line}"

    @property
    def sentence(self) -> str:
        """What it costs and what to do about it."""
        what = f"`{self.code}`" if self.code else self.function
        if not self.at_collective:
            return f"the graph ends at {what}; nothing is fused across it: {self.reason}"
        gemm = f", so the GEMM `{self.gemm}` before it is not fused with it" if self.gemm else ", so it can't be fused"
        remedy = (
            "leave out async_op=True (the fused operator overlaps by itself)"
            if any(sign in text for sign in ("async_op", "Work`") for text in (self.code, self.reason))
            else "use the form in torch.distributed._functional_collectives, or a synchronous call"
        )
        return f"the collective {what} runs outside the graph{gemm}; {remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why one of Dynamo's graphs ended, and the GEMM that it ended with (empty: none)."""

    reason: GraphCompileReason | None
    gemm: str


def ending_of(graph: fx.GraphModule) -> Ending:
    """To be asked before the compiler takes the graph over and changes it."""
    reason = graph.compile_subgraph_reason
    assert reason is None or isinstance(reason, GraphCompileReason)
    return Ending(reason=reason, gemm=_last_gemm(graph))


def collect(endings: Iterable[Ending]) -> list[GraphBreak]:
    """The breaks since Dynamo's last reset, each place once."""
    gemm_before = {id(one.reason): one.gemm for one in endings}
    found: dict[tuple[str, int], GraphBreak] = {}
    for reason in graph_break_reasons:
        if not reason.user_stack:
            continue
        frame = reason.user_stack[-1]
        key = (frame.filename, frame.lineno or 0)
        one = GraphBreak(
            file=frame.filename,
            line=key[1],
            function=frame.name,
            code=(frame.line or "").strip(),
            reason=_first_lines(reason.reason),
            gemm=gemm_before.get(id(reason), ""),
        )
        if _is_wait_of_async(one) and any(other.at_collective for other in found.values()):
            continue  # the consequence of a break that is listed
        if key not in found or (one.gemm and not found[key].gemm):
            found[key] = one
    return list(found.values())


def _is_wait_of_async(one: GraphBreak) -> bool:
    return "Work`" in one.reason


def _first_lines(text: str) -> str:
    """The compiler's reason without its hints and links."""
    kept = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return "; ".join(kept[:2])


def _last_gemm(graph: fx.GraphModule) -> str:
    """The name of a GEMM whose result, but for views, is a result of the graph."""
    return next((node.name for node in _sources(graph.graph.output_node()) if _name(node) in _GEMM_NAMES), "")


def _sources(output: fx.Node) -> Iterator[fx.Node]:
    for node in output.all_input_nodes:
        while _name(node) in _VIEW_NAMES and node.all_input_nodes:
            node = node.all_input_nodes[0]
        yield node


def _name(node: fx.Node) -> str:
    target: Any = node.target
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))
