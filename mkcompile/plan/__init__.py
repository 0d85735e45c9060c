"""How a problem is carried out on a machine: topology, cost, candidates, decision. Imports no device and no graph."""

from mkcompile.plan.decide import Decision, Policy, decide
from mkcompile.plan.judge import Judge, Prediction, judge_for, predict
from mkcompile.plan.plan import UNFUSED, Plan, Refusal, Roles, Tile
from mkcompile.plan.table import PlanTable
from mkcompile.plan.topology import PRESETS, Gpu, Span, Topology, preset

__all__ = [
    "PRESETS",
    "UNFUSED",
    "Decision",
    "Gpu",
    "Judge",
    "Plan",
    "PlanTable",
    "Policy",
    "Prediction",
    "Refusal",
    "Roles",
    "Span",
    "Tile",
    "Topology",
    "decide",
    "judge_for",
    "predict",
    "preset",
]
