"""Single operators on a machine: what the planner decides and predicts for each problem."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from mkcompile.errors import OptionError
from mkcompile.ops import OPERATOR_MODULES
from mkcompile.ops.problem import Problem
from mkcompile.plan.decide import Decision, Policy, decide
from mkcompile.plan.kernels import EXISTING
from mkcompile.plan.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """Decisions of single operators on one machine."""

    topology: str
    decisions: Sequence[Decision]

    def to_dict(self) -> dict[str, Any]:
        """Plain values. Units: seconds."""
        return {"topology": self.topology, "operators": [_values(one) for one in self.decisions]}

    def table(self) -> Table:
        """One operator a line. Microseconds."""
        table = Table(title=f"Predicted operators on {self.topology} (microseconds)", box=SIMPLE_HEAD)
        table.add_column("operator, m x n x k, ranks", overflow="fold")
        for name in ("unfused", "fused", "ceiling", "x"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("plan", overflow="fold")
        for one in self.decisions:
            problem = one.problem
            what = f"{problem.operator}, {problem.m} x {problem.n} x {problem.k}, {problem.world_size}"
            fused = "-" if one.fused_s is None else f"{one.fused_s * 1e6:.1f}"
            ratio = "-" if one.fused_s is None else f"{one.unfused_s / one.fused_s:.2f}"
            table.add_row(what, f"{one.unfused_s * 1e6:.1f}", fused, f"{one.ceiling_s * 1e6:.1f}", ratio, _outcome(one))
        return table


def _outcome(decision: Decision) -> str:
    if decision.refusal is not None:
        return f"unfused: {decision.refusal.value}"
    plan = decision.plan
    return f"{plan.variant} {plan.tile}, {plan.roles.compute}+{plan.grid - plan.roles.compute} blocks"


def _values(decision: Decision) -> dict[str, Any]:
    problem = decision.problem
    return {
        "operator": problem.operator,
        "m": problem.m,
        "n": problem.n,
        "k": problem.k,
        "world_size": problem.world_size,
        "unfused_s": decision.unfused_s,
        "fused_s": decision.fused_s,
        "ceiling_s": decision.ceiling_s,
        "plan": decision.plan.name,
        "refusal": None if decision.refusal is None else decision.refusal.name,
    }


def sweep(problems: Iterable[Problem], topology: Topology, policy: Policy = EXISTING) -> SweepResult:
    """Decide them all; by default with the kernels that exist."""
    return SweepResult(topology=topology.name, decisions=[decide(one, topology, policy) for one in problems])


def parse_site(text: str, world_size: int) -> Problem:
    """A bf16 problem from `operator:MxNxK`, or `ffn:MxNxKxHIDDEN`.

    Raises: OptionError.
    """
    operator, _, shape = text.partition(":")
    sizes = shape.split("x")
    if operator not in OPERATOR_MODULES or not all(size.isdigit() for size in sizes):
        raise OptionError(f"a site is operator:MxNxK with an operator of {', '.join(OPERATOR_MODULES)}; got {text!r}")
    wanted = 4 if operator == "ffn" else 3
    if len(sizes) != wanted:
        raise OptionError(f"{operator} takes {wanted} sizes, got {len(sizes)} in {text!r}")
    m, n, k, *hidden = (int(size) for size in sizes)
    more = {"hidden": hidden[0], "gated": True, "activation": "silu"} if hidden else {}
    return Problem(operator=operator, m=m, n=n, k=k, world_size=world_size, dtype="bfloat16", dtype_bytes=2, **more)  # type: ignore[arg-type]
