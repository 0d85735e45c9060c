"""From captured graphs to the rows of a report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mkcompile.errors import GroupError
from mkcompile.inspect.capture import CapturedGraph
from mkcompile.inspect.colour import Colouring, colour
from mkcompile.inspect.predict import Planner
from mkcompile.inspect.rows import Collective, GraphPair
from mkcompile.inspect.snapshot import NodeView
from mkcompile.ops.groups import resolve
from mkcompile.passes.site import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The report's rows and graphs."""

    collectives: tuple[Collective, ...]
    graphs: tuple[GraphPair, ...]


def rows_of(graphs: Sequence[CapturedGraph], planner: Planner) -> Rows:
    """Number the sites of all graphs in order and describe them."""
    collectives: list[Collective] = []
    pairs: list[GraphPair] = []
    for index, captured in enumerate(graphs):
        first = collectives[-1].site + 1 if collectives else 1
        colouring = colour(captured, first)
        collectives.extend(_rows(index, captured, colouring, planner))
        pairs.append(
            GraphPair(
                phase=captured.phase,
                before=captured.before.coloured(colouring.before),
                after=captured.after.coloured(colouring.after),
            )
        )
    return Rows(collectives=tuple(collectives), graphs=tuple(pairs))


def _rows(index: int, captured: CapturedGraph, colouring: Colouring, planner: Planner) -> Iterator[Collective]:
    nodes = {node.name: node for node in (*captured.after.nodes, *captured.before.nodes, *captured.normalised.nodes)}
    for site, number in zip(captured.sites, colouring.numbers, strict=True):
        node = nodes.get(site.collective)
        world_size = site.problem.world_size if site.problem else group_size(site.group)
        yield Collective(
            site=number,
            graph=index,
            phase=captured.phase,
            node=site.collective,
            kind=site.kind,
            group=site.group,
            world_size=world_size,
            shape=site.shape,
            dtype=node.dtype if node else "",
            sent_bytes=_sent_bytes(site, node, world_size),
            operator=site.operator,
            reason=site.reason,
            detail=site.detail,
            problem=site.problem,
            residual=site.residual,
            estimate=planner.predict(site.problem) if site.problem else None,
            transport=planner.transport(site.group) if group_size(site.group) else "",
        )


def group_size(name: str) -> int:
    """The ranks of a group by name; 0 where the graph does not hold a name."""
    try:
        return resolve("explain", name).size()
    except GroupError:
        return 0


def _sent_bytes(site: Site, node: NodeView | None, world_size: int) -> int:
    """What each rank sends at least (ring or direct exchange).

    An all-reduce sends twice (world - 1) / world of its result, a gather or exchange once; a reduce-scatter's result
    is one rank's share of what is reduced, so it sends (world - 1) of them.
    """
    if node is None or not world_size:
        return 0
    peers = world_size - 1
    if site.kind.startswith("reduce_scatter"):
        return node.result_bytes * peers
    return (2 if site.kind.startswith("all_reduce") else 1) * node.result_bytes * peers // world_size
