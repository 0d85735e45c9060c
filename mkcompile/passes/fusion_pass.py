"""The pass as Inductor calls it: a CustomGraphPass with a uuid, so that the compile caches stay on."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

import mkcompile
from mkcompile.config import Options
from mkcompile.passes.fuse import Judge, fuse, fuse_all
from mkcompile.passes.reason import Reason
from mkcompile.passes.site import Site

log = logging.getLogger(__name__)

Listener = Callable[[fx.Graph, list[Site]], None]


def source_digest() -> str:
    """A hash of this package's Python sources: a changed pass must not meet old cache entries."""
    digest = hashlib.sha256()
    root = Path(mkcompile.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


class FusionPass(CustomGraphPass):
    """Fuses GEMMs with the collectives around them in a post-grad graph.

    Usable alone in another stack's Inductor configuration:
    `torch.compile(model, options={"post_grad_custom_pre_pass": mkcompile.FusionPass()})`.
    """

    def __init__(self, options: Options | None = None, judge: Judge = fuse_all, facts: str = "") -> None:
        """`facts` names what the judge's decisions depend on (topology class, world size); it enters the uuid."""
        self._options = options or Options()
        self._judge = judge
        self._facts = facts
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        """Call `listener(graph, sites)` after each graph."""
        self._listeners.append(listener)

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite the graph in place."""
        judge: Judge = (lambda problem: Reason.POLICY_NEVER) if self._options.fuse == "never" else self._judge
        sites = fuse(graph, judge)
        for site in sites:
            log.debug("%s %s: %s", site.kind, site.collective, site.operator or site.reason)
        for listener in self._listeners:
            listener(graph, sites)

    def uuid(self) -> str:
        """Covers sources, options, the judge's facts and torch's version; nothing that differs between ranks."""
        parts = (source_digest(), repr(self._options), self._facts, torch.__version__)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()
