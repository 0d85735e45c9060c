"""The pass as Inductor calls it: a CustomGraphPass with a uuid, so that the compile caches stay on."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from mkcompile.config import Options
from mkcompile.ops.problem import Problem
from mkcompile.passes import artifact, residual
from mkcompile.passes.fuse import Judge, fuse, fuse_all
from mkcompile.passes.reason import Reason
from mkcompile.passes.site import Site
from mkcompile.passes.uneven_shards import UnevenSizes

log = logging.getLogger(__name__)

Listener = Callable[[fx.Graph, list[Site]], None]
Facts = Callable[[], str]


@cache
def source_digest() -> str:
    """A hash of this package's Python sources: a changed pass must not meet old cache entries."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def group_names() -> list[str]:
    """Of all process groups that this rank is in."""
    return sorted(dist.distributed_c10d._world.pg_names.values()) if dist.is_initialized() else []


def group_sizes() -> str:
    """`name=size` of every process group that this rank is in: a graph holds sizes, and names groups."""
    if not dist.is_initialized():
        return "no process group"
    names = dist.distributed_c10d._world.pg_names
    return ",".join(sorted(f"{name}={group.size()}" for group, name in names.items()))


def _fuse_nothing(problem: Problem) -> Reason:
    return Reason.POLICY_NEVER


class FusionPass(CustomGraphPass):
    """Fuses GEMMs with the collectives around them in a post-grad graph.

    By itself it knows no machine and fuses whatever is legal; `mkcompile.FusionPass` is given the planner.
    """

    def __init__(
        self,
        options: Options | None = None,
        judge: Judge = fuse_all,
        facts: str | Facts = "",
        always: Judge = fuse_all,
        uneven: UnevenSizes | None = None,
    ) -> None:
        """`judge` decides under the policy `auto`, `always` under that; `facts` names what their decisions depend on
        and enters the uuid. `uneven`: sizes whose products stay, see `passes.uneven_shards`.

        Facts that are not known before the process group is there are given as a function.
        """
        self._options = options or Options()
        self._judge = {"auto": judge, "always": always, "never": _fuse_nothing}[self._options.fuse]
        self._facts = facts
        self._uneven = uneven or {}
        self._listeners: list[Listener] = []
        self._graphs: list[list[Site]] = []

    @property
    def graphs(self) -> list[list[Site]]:
        """What became of the collectives of each graph so far; graphs that came from a cache are not among them."""
        return [list(sites) for sites in self._graphs]

    def listen(self, listener: Listener) -> None:
        """Call `listener(graph, sites)` after each graph."""
        self._listeners.append(listener)

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite the graph in place."""
        adds = self.adds if self._options.residuals == "in_place" else None
        sites = fuse(graph, self.judge, self._options.fuse, self._options.results, self._uneven, adds)
        self._graphs.append(sites)
        log.info("%s", describe(sites))
        artifact.trace(graph, sites)
        for listener in self._listeners:
            listener(graph, sites)

    def judge(self, group: str, problem: Problem) -> tuple[Problem, float | Reason]:
        """The problem as it lies in the group of that name, and whether it is fused."""
        return problem, self._judge(problem)

    def adds(self, group: str, problem: Problem) -> bool:
        """Whether the kernel of a problem that is fused can add its result to a residual in place."""
        return residual.anywhere(group, problem)

    def report(self) -> str:
        """One line for each graph and each collective."""
        if not self._graphs:
            return "no graph was compiled yet, or all came from the compile cache"
        return "\n".join(f"graph {number}: {describe(sites)}" for number, sites in enumerate(self._graphs))

    def uuid(self) -> str:
        """Covers sources, options, the judge's facts, the groups' sizes, torch's version; no rank, no measurement."""
        facts = self._facts if isinstance(self._facts, str) else self._facts()
        uneven = repr([(group, sorted(sizes)) for group, sizes in self._uneven.items()])
        parts = (source_digest(), repr(self._options), facts, uneven, group_sizes(), torch.__version__)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def describe(sites: list[Site]) -> str:
    """What became of one graph's collectives, for logs and reports."""
    if not sites:
        return "no collective: compiled as plain Inductor"
    num_fused = sum(site.operator is not None for site in sites)
    lines = [f"{num_fused} of {len(sites)} collectives fused"]
    for site in sites:
        fate = f"fused as {site.operator}{_added(site)}" if site.operator else f"left as it was: {_why(site)}"
        lines.append(f"  {site.kind} {site.collective} [{', '.join(site.shape)}]: {fate}")
    return "\n".join(lines)


def _why(site: Site) -> str:
    assert site.reason is not None
    return site.reason.value + (f" ({site.detail})" if site.detail else "")


def _added(site: Site) -> str:
    return f", {site.residual.sentence}" if site.residual else ""
