"""The rewritten graph in torch's structured trace: `TORCH_TRACE=folder`, then `tlparse folder`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from torch import fx
from torch._logging._internal import trace_structured

from mkcompile.passes.site import Site

GRAPH, SITES = "mkcompile_graph", "mkcompile_sites"


def trace(graph: fx.Graph, sites: Sequence[Site]) -> None:
    """Two artifacts a graph with collectives; costs nothing where no trace is written."""
    if not sites:
        return
    trace_structured(
        "artifact", metadata_fn=lambda: {"name": GRAPH, "encoding": "string"}, payload_fn=lambda: _text(graph)
    )
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": SITES, "encoding": "json"},
        payload_fn=lambda: json.dumps([_plain(site) for site in sites], indent=1),
    )


def _text(graph: fx.Graph) -> str:
    module = graph.owning_module
    if module is None:
        return str(graph)
    return str(module.print_readable(print_output=False, include_stride=True, include_device=True))


def _plain(site: Site) -> dict[str, object]:
    return {
        "collective": site.collective,
        "kind": site.kind,
        "group": site.group,
        "shape": list(site.shape),
        "operator": site.operator,
        "reason": site.reason.name if site.reason else None,
        "detail": site.detail,
        "problem": site.problem.key() if site.problem else None,
        "residual": site.residual.name if site.residual else None,
    }
