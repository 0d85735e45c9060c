"""Runs the steps: one model on one machine, or on more and more nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mkcompile.plan.decide import Policy
from mkcompile.plan.kernels import EXISTING
from mkcompile.plan.simulate.engine import Event, run
from mkcompile.plan.simulate.layout import Layout, Workload
from mkcompile.plan.simulate.models import Model, model
from mkcompile.plan.simulate.result import OperatorRow, SimulationResult, StepRow, merge
from mkcompile.plan.simulate.step import Case, step_tasks
from mkcompile.plan.topology import Topology, preset


def simulate(
    of: Model | str,
    topology: Topology | str,
    layout: Layout | None = None,
    workload: Workload | None = None,
    policy: Policy = EXISTING,
) -> SimulationResult:
    """One step of a model, unfused and fused, by default with the kernels that exist; `Policy()` takes all.

    The layout's default: tensor parallelism over a node (at most 8), data parallelism over the rest.
    Raises: OptionError for unknown names, and for a layout that fits neither model nor machine.
    """
    one = model(of) if isinstance(of, str) else of
    machine = preset(topology) if isinstance(topology, str) else topology
    plan = layout or default_layout(one, machine)
    plan.check(one, machine)
    case = Case(model=one, topology=machine, layout=plan, workload=workload or Workload())
    unfused = run(step_tasks(case, policy, fuse=False))
    fused = run(step_tasks(case, policy, fuse=policy.fuse != "never"))
    row = StepRow(
        model=one.name,
        topology=machine.name,
        num_gpus=plan.num_gpus,
        layout=str(plan),
        workload=str(case.workload),
        compute_s=sum(event.task.compute_s for event in unfused),
        unfused_s=max(event.end_s for event in unfused),
        fused_s=max(event.end_s for event in fused),
        operators=_operators(unfused, fused),
    )
    return SimulationResult(rows=(row,), timeline=tuple(fused))


def default_layout(one: Model, machine: Topology) -> Layout:
    """Tensor parallelism over a node, at most 8; data parallelism over the rest; experts over as many as fit."""
    tensor = min(8, machine.gpus_per_node)
    while one.num_heads % tensor:
        tensor -= 1
    data = machine.num_gpus // tensor
    expert = 1
    if one.experts is not None:
        sizes = range(1, min(one.experts.count, tensor * data) + 1)
        expert = max(size for size in sizes if one.experts.count % size == 0 and (tensor * data) % size == 0)
    return Layout(tensor=tensor, data=data, expert=expert)


NODES = (1, 2, 4, 8, 16, 32, 64, 128)


def scaling(
    of: Model | str,
    topology: Topology | str,
    nodes: Sequence[int] = NODES,
    workload: Workload | None = None,
    policy: Policy = EXISTING,
) -> SimulationResult:
    """The default layout on more and more nodes."""
    base = preset(topology) if isinstance(topology, str) else topology
    nic_gbps = base.nic_gbps or 50.0
    machines = [
        replace(base, name=f"{count} x {base.gpus_per_node} {base.gpu.name}", num_nodes=count, nic_gbps=nic_gbps)
        for count in nodes
    ]
    return merge([simulate(of, machine, None, workload, policy) for machine in machines])


@dataclass(slots=True)
class _Sum:
    sites: int = 0
    unfused_s: float = 0.0
    fused_s: float = 0.0
    variants: set[str] = field(default_factory=set)


def _operators(unfused: Sequence[Event], fused: Sequence[Event]) -> tuple[OperatorRow, ...]:
    """Fused tasks by operator; what they replace belongs to the same site."""
    apart: dict[str, float] = defaultdict(float)
    for event in unfused:
        apart[event.task.site] += event.task.seconds
    sums: dict[str, _Sum] = defaultdict(_Sum)
    for event in fused:
        if event.task.kind == "fused":
            operator, _, variant = event.task.label.partition("/")
            found = sums[operator]
            found.sites += 1
            found.fused_s += event.task.seconds
            found.unfused_s += apart[event.task.site]
            found.variants.add(variant or "fused")
    return tuple(
        OperatorRow(
            operator=operator,
            variant=", ".join(sorted(one.variants)),
            sites=one.sites,
            unfused_s=one.unfused_s,
            fused_s=one.fused_s,
        )
        for operator, one in sorted(sums.items())
    )
