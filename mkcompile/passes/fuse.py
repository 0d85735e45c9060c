"""Normalise, find, choose, rewrite: what the pass does to one graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import fx

from mkcompile.ops.problem import Problem
from mkcompile.passes import normalise, rewrite
from mkcompile.passes.finders import finders
from mkcompile.passes.graph import WAIT, collectives, is_call, shape_of
from mkcompile.passes.reason import Reason
from mkcompile.passes.site import Match, Refusal, Site
from mkcompile.passes.sizes import SizeNodes

# Seconds that fusing the problem is predicted to save, or the reason not to.
Judge = Callable[[Problem], float | Reason]


def fuse_all(problem: Problem) -> float:
    """The judge that fuses whatever is legal; larger problems first."""
    return float(max(problem.flops, 1))


@dataclass(slots=True)
class _Findings:
    matches: list[Match] = field(default_factory=list)
    refusals: dict[fx.Node, list[Refusal]] = field(default_factory=lambda: defaultdict(list))


def fuse(graph: fx.Graph, judge: Judge = fuse_all) -> list[Site]:
    """Rewrite the graph in place; what became of each collective, in graph order."""
    normalise.run(graph)
    nodes = list(collectives(graph))
    findings = _find(nodes)
    fused = _choose_and_rewrite(graph, findings, judge)
    erase_unused(graph, list(fused))
    return [_site(node, fused.get(node), findings.refusals.get(node, [])) for node in nodes]


def erase_unused(graph: fx.Graph, replaced: list[fx.Node]) -> None:
    """Remove replaced collectives with their waits; torch counts both as effects and would keep them for ever."""
    graph.eliminate_dead_code()
    for collective in reversed(replaced):
        for wait in [user for user in collective.users if is_call(user, WAIT) and not user.users]:
            graph.erase_node(wait)
        if not collective.users:
            graph.erase_node(collective)
    graph.eliminate_dead_code()


def _find(nodes: list[fx.Node]) -> _Findings:
    findings = _Findings()
    for node in nodes:
        for find in finders().values():
            found = find(node)
            if isinstance(found, Match):
                findings.matches.append(found)
            elif found is not None:
                findings.refusals[node].append(found)
    return findings


def _choose_and_rewrite(graph: fx.Graph, findings: _Findings, judge: Judge) -> dict[fx.Node, Match]:
    """Take matches by falling saving, each unless a better one has its collectives or outputs."""
    judged: list[tuple[float, Match]] = []
    for match in findings.matches:
        verdict = judge(match.problem)
        if isinstance(verdict, Reason):
            _refuse(findings, match, verdict)
        else:
            judged.append((verdict, match))
    sizes = SizeNodes(graph)
    taken: set[fx.Node] = set()
    fused: dict[fx.Node, Match] = {}
    for _, match in sorted(judged, key=lambda pair: -pair[0]):
        claims = {*match.collectives, *(output.node for output in match.outputs)}
        if not claims.isdisjoint(taken):
            _refuse(findings, match, Reason.OVERLAPS_BETTER_SITE)
            continue
        reason = rewrite.apply(graph, match, match.problem.key(), sizes)
        if reason is not None:
            _refuse(findings, match, reason)
            continue
        taken |= claims
        fused.update(dict.fromkeys(match.collectives, match))
    return fused


def _refuse(findings: _Findings, match: Match, reason: Reason) -> None:
    for node in match.collectives:
        findings.refusals[node].append(Refusal(collective=node, reason=reason))


def _site(node: fx.Node, match: Match | None, refusals: list[Refusal]) -> Site:
    shape = tuple(str(size) for size in shape_of(node))
    kind = str(node.target).removeprefix("_c10d_functional.").removesuffix(".default")
    site = {"collective": node.name, "kind": kind, "group": str(node.args[-1]), "shape": shape}
    if match is not None:
        return Site(**site, operator=match.call.NAME, problem=match.problem)  # type: ignore[arg-type]
    telling = [one for one in refusals if one.reason is not Reason.NO_GEMM] or refusals
    if not telling:
        return Site(**site, reason=Reason.NO_GEMM)  # type: ignore[arg-type]
    return Site(**site, reason=telling[0].reason, detail=telling[0].detail)  # type: ignore[arg-type]
