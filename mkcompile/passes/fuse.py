"""Normalise, find, choose, rewrite: what the pass does to one graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import fx
from torch._inductor import config as inductor_config

from mkcompile.config import FusePolicy, ResultPolicy
from mkcompile.ops.problem import Problem
from mkcompile.ops.registry import arguments, overload
from mkcompile.passes import facts, normalise, residual
from mkcompile.passes.choose import Candidate, choose
from mkcompile.passes.finders import finders
from mkcompile.passes.graph import collectives, erase_dead, erase_with_waits, inputs_of, shape_of
from mkcompile.passes.other_collectives import refusal_of
from mkcompile.passes.reason import Reason
from mkcompile.passes.residual import Adds
from mkcompile.passes.rewrite import Rewriter
from mkcompile.passes.site import Match, Refusal, Site
from mkcompile.passes.uneven_shards import UnevenSizes, sizes_within
from mkcompile.plan import key

# Seconds that fusing the problem is predicted to save, or the reason not to.
Judge = Callable[[Problem], float | Reason]
# The problem with how the group of this name lies, and the verdict on it.
JudgeInGroup = Callable[[str, Problem], tuple[Problem, float | Reason]]


def fuse_all(problem: Problem) -> float:
    """The judge that fuses whatever is legal; larger problems first."""
    num_rows = max(problem.m, 1)  # 0 where it is symbolic
    return float(max(replace(problem, m=num_rows).flops, 1))


def anywhere(judge: Judge) -> JudgeInGroup:
    """All groups are alike."""
    return lambda group, problem: (problem, judge(problem))


_EVERYTHING = anywhere(fuse_all)
_NONE: UnevenSizes = MappingProxyType({})


@dataclass(slots=True)
class _Findings:
    """Matches, and for each collective why not: refused matches first, since they came closest, then refused forms."""

    matches: list[Match] = field(default_factory=list)
    refused_matches: dict[fx.Node, list[Refusal]] = field(default_factory=lambda: defaultdict(list))
    refused_forms: dict[fx.Node, list[Refusal]] = field(default_factory=lambda: defaultdict(list))

    def refuse(self, match: Match, reason: Reason) -> None:
        """All collectives of the match got this answer."""
        for node in match.collectives:
            refusal = Refusal(collective=node, reason=reason, detail=match.call.NAME, problem=match.problem)
            self.refused_matches[node].append(refusal)

    def refusal(self, node: fx.Node) -> Refusal:
        """The most telling refusal of a collective."""
        refusals = [*self.refused_matches[node], *self.refused_forms[node]]
        telling = [one for one in refusals if one.reason is not Reason.NO_GEMM]
        return telling[0] if telling else Refusal(collective=node, reason=Reason.NO_GEMM)


def fuse(
    graph: fx.Graph,
    judge: JudgeInGroup = _EVERYTHING,
    policy: FusePolicy = "always",
    results: ResultPolicy = "ordinary",
    uneven: UnevenSizes = _NONE,
    adds: Adds | None = residual.anywhere,
) -> list[Site]:
    """Rewrite the graph in place; what became of each collective, in graph order. Calls carry the policy.

    Under `never` the graph stays as Inductor made it: normalising merges collectives, too.
    `uneven`: sizes that stand for a dimension of which a group's ranks have different sizes; what has one stays.
    `adds`: whether a problem's kernel adds to a residual in place; None: that is not wanted.
    """
    if next(collectives(graph), None) is None:
        return []
    if policy != "never":
        normalise.run(graph)
    nodes = list(collectives(graph))
    findings = _find(nodes)
    rewriter = Rewriter(graph)
    fused = _choose_and_rewrite(rewriter, findings, judge, policy, uneven)
    # Read before the replaced nodes are erased.
    sites = [_site(node, fused.get(node) or findings.refusal(node)) for node in nodes]
    if fused:
        erase_unused(graph, list(fused))
    normalise.undo(graph)
    facts.mark(graph, results)
    # Last: facts are of calls that have results, and hold for those that work in place.
    problems = {rewriter.calls[node]: match.problem for node, match in fused.items()}
    outcome = residual.add_in_place(graph, problems, adds, results)
    return [
        replace(site, residual=outcome.get(rewriter.calls[node])) if node in fused else site
        for node, site in zip(nodes, sites, strict=True)
    ]


def erase_unused(graph: fx.Graph, replaced: Sequence[fx.Node]) -> None:
    """Remove replaced collectives with their waits; torch counts waits as effects and would keep them for ever."""
    for _ in range(2):  # the first round leaves those whose readers are dead themselves
        for collective in reversed(replaced):
            if not collective._erased:
                erase_with_waits(graph, collective)
        erase_dead(graph)


def _find(nodes: list[fx.Node]) -> _Findings:
    findings = _Findings()
    finds = list(finders().values())
    for node in nodes:
        answers = [found for find in finds if (found := find(node)) is not None]
        for found in answers or [refusal_of(node)]:
            if isinstance(found, Match):
                findings.matches.append(found)
            else:
                findings.refused_forms[node].append(found)
    return findings


def _choose_and_rewrite(
    rewriter: Rewriter, findings: _Findings, judge: JudgeInGroup, policy: FusePolicy, uneven: UnevenSizes
) -> dict[fx.Node, Match]:
    """Rewrite the best set of matches; where the graph does not allow one, the best set without it."""
    candidates: list[Candidate] = []
    for found in findings.matches:
        problem, verdict = judge(found.call.group, found.problem)
        match = replace(found, problem=problem)
        verdict = _unfit(match, uneven, verdict) or verdict
        if isinstance(verdict, Reason):
            findings.refuse(match, verdict)
        else:
            candidates.append(Candidate(match=match, saving=verdict))
    fused: dict[fx.Node, Match] = {}
    done: set[fx.Node] = set()
    while candidates:
        chosen, rest = choose(candidates)
        for one in chosen:
            reason = rewriter.apply(one.match, key.make(policy, one.match.problem))
            if reason is None:
                done |= one.match.claims
                fused.update(dict.fromkeys(one.match.collectives, one.match))
            else:
                findings.refuse(one.match, reason)
        candidates = []
        for one in rest:
            if done.isdisjoint(one.match.claims):
                candidates.append(one)
            else:
                findings.refuse(one.match, Reason.OVERLAPS_BETTER_SITE)
    return fused


def _unfit(match: Match, uneven: UnevenSizes, verdict: float | Reason) -> Reason | None:
    """Why the operator can't stand in what is being compiled: the same on all ranks, whatever their verdicts."""
    if _has_size_of(sizes_within(uneven, match.call.group), match):
        return Reason.UNEVEN_SHARDS
    if isinstance(verdict, Reason):
        return None
    # Inductor's FX wrapper knows no line for the check behind an operator that it has no kernel for (torch 2.13)
    if inductor_config.fx_wrapper and inductor_config.alignment_asserts:
        return Reason.FX_WRAPPER
    # Inductor's C++ wrapper crashes at lists, also where it has taken them (torch 2.13)
    returns_list = isinstance(overload(type(match.call))._schema.returns[0].type, torch.ListType)
    return Reason.CPP_WRAPPER if inductor_config.cpp_wrapper and returns_list else None


def _has_size_of(sizes: frozenset[int], match: Match) -> bool:
    """Has an operand a dimension of one of these sizes?"""
    operands = inputs_of(arguments(match.call)) if sizes else ()
    return any(isinstance(size, int) and size in sizes for one in operands for size in shape_of(one))


def _site(node: fx.Node, outcome: Match | Refusal) -> Site:
    shape = tuple(str(size) for size in _result_shape(node))
    kind = str(node.target).removeprefix("_c10d_functional.").removesuffix(".default")
    site = {"collective": node.name, "kind": kind, "group": str(node.args[-1]), "shape": shape}
    if isinstance(outcome, Match):
        return Site(**site, operator=outcome.call.NAME, problem=outcome.problem)  # type: ignore[arg-type]
    why = {"reason": outcome.reason, "detail": outcome.detail, "problem": outcome.problem}
    return Site(**site, **why)  # type: ignore[arg-type]


def _result_shape(node: fx.Node) -> tuple[object, ...]:
    """The result's shape; of a collective with several results how many elements they have together."""
    results = node.meta["val"]
    return (sum(one.numel() for one in results),) if isinstance(results, (list, tuple)) else shape_of(node)
