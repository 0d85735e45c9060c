"""The predicted step: what the compute units and the links do when, as it is and fused.

One rank, the graphs in order. GEMMs and collectives are timed by the planner's cost model, attention by its FLOPs,
the rest as Inductor's fused element-wise kernels, by the bytes that must reach memory. A collective runs beside the
computation until something needs its result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from mkcompile.inspect.rows import Collective, GraphPair
from mkcompile.inspect.snapshot import GraphView, NodeView
from mkcompile.plan.collective_cost import nccl_us
from mkcompile.plan.constants import constants
from mkcompile.plan.gemm_cost import Gemm, cublas_us, elementwise_us
from mkcompile.plan.topology import Topology

_KINDS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
_KERNELS = ("gemm", "collective", "attention", "fused", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One kernel. `lane`: `compute`, `link`, or `both` for a fused operator. Units: seconds from the step's start."""

    node: str
    role: str
    lane: str
    start_s: float
    end_s: float
    graph: int
    site: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One run of all graphs."""

    bars: tuple[Bar, ...]

    @property
    def end_s(self) -> float:
        """When the last kernel ends."""
        return max((bar.end_s for bar in self.bars), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timelines:
    """The step as it is, and fused. Units: seconds."""

    unfused: Timeline
    fused: Timeline


@dataclass(slots=True)
class _Clocks:
    compute_s: float = 0.0
    link_s: float = 0.0


def predict(graphs: Sequence[GraphPair], rows: Sequence[Collective], topology: Topology) -> Timelines:
    """Both timelines; a site that the planner gave no estimate for takes no time in the fused one."""
    costs = _Costs(topology=topology, rows=rows)
    after = [pair.before if _by_reference(index, rows) else pair.after for index, pair in enumerate(graphs)]
    return Timelines(unfused=_run([pair.before for pair in graphs], costs), fused=_run(after, costs))


def _by_reference(graph: int, rows: Sequence[Collective]) -> bool:
    """Do kernels take none of the graph's operators? Then it does what it did, and nothing at once."""
    operators = [row for row in rows if row.graph == graph and row.fused]
    return bool(operators) and all(row.by_reference for row in operators)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Costs:
    """How long one node takes. Units: seconds."""

    topology: Topology
    rows: Sequence[Collective]

    def of(self, node: NodeView, graph: Mapping[str, NodeView]) -> float:
        """Zero for what is no kernel of its own."""
        gpu, values = self.topology.gpu, constants()
        if node.role == "gemm" and node.sizes:
            n = node.sizes[-1]
            gemm = Gemm(m=prod(node.sizes[:-1]), n=n, k=node.contracted, dtype_bytes=_element_bytes(node))
            return cublas_us(gemm, gpu, values) * 1e-6
        if node.role == "collective":
            return self._collective(node)
        if node.role == "attention":
            return node.flops / (gpu.peak_tflops * 1e12 * values.attention_fraction)
        if node.role == "fused":
            estimates = (row.estimate for row in self.rows if row.site == node.site and row.estimate)
            return next((estimate.rewritten_s for estimate in estimates), 0.0)
        return elementwise_us(_memory_bytes(node, graph), gpu, values) * 1e-6

    def _collective(self, node: NodeView) -> float:
        row = next((row for row in self.rows if row.node == node.name), None)
        kind = _KINDS.get(node.call.rstrip("_"))
        world_size = row.world_size if row else max((one.world_size for one in self.rows), default=0)
        if kind is None or not world_size:
            return 0.0
        whole_bytes = node.result_bytes * (world_size if kind == "reduce_scatter" else 1)
        problem = row.problem if row else None
        span = self.topology.span(world_size) if problem is None else self.topology.span_of(problem)
        return nccl_us(kind, whole_bytes, span, self.topology.reaching(span.num_nodes), constants()) * 1e-6


def _element_bytes(node: NodeView) -> int:
    return max(node.result_bytes // max(prod(node.sizes), 1), 1)


def _memory_bytes(node: NodeView, graph: Mapping[str, NodeView]) -> int:
    """Bytes that a chain of element-wise nodes moves: counted at its last one, which a kernel of another kind reads."""
    if node.role != "other" or node.call == "getitem":
        return 0
    if not _is_kept(node, graph):
        return 0
    return node.result_bytes + sum(graph[one].result_bytes for one in node.inputs)


def _is_kept(node: NodeView, graph: Mapping[str, NodeView]) -> bool:
    return any(user.role != "other" for user in graph.values() if node.name in user.inputs)


def _run(graphs: Iterable[GraphView], costs: _Costs) -> Timeline:
    bars: list[Bar] = []
    clocks = _Clocks()
    for index, graph in enumerate(graphs):
        _run_one(index, graph, costs, clocks, bars)
    return Timeline(bars=tuple(bars))


def _run_one(index: int, graph: GraphView, costs: _Costs, clocks: _Clocks, bars: list[Bar]) -> None:
    by_name = {node.name: node for node in graph.nodes}
    ready: dict[str, float] = {}
    for node in graph.nodes:
        inputs_s = max((ready.get(one, 0.0) for one in node.inputs), default=0.0)
        duration_s = costs.of(node, by_name) if node.role in _KERNELS else 0.0
        if duration_s == 0.0:
            ready[node.name] = inputs_s
            continue
        lane = {"collective": "link", "fused": "both"}.get(node.role, "compute")
        start_s = max(
            inputs_s, *([clocks.link_s] if lane != "compute" else []), *([clocks.compute_s] if lane != "link" else [])
        )
        end_s = start_s + duration_s
        if lane != "compute":
            clocks.link_s = end_s
        if lane != "link":
            clocks.compute_s = end_s
        ready[node.name] = end_s
        bars.append(
            Bar(node=node.name, role=node.role, lane=lane, start_s=start_s, end_s=end_s, graph=index, site=node.site)
        )
