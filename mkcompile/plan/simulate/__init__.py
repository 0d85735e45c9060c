"""`simulate`: predicted steps of whole models on machines that need not be here.

The same cost model as the planner's, run as discrete events, with the kernels that exist; under `Policy()` those that
are planned but do not exist yet (`ffn`, experts, ring attention) count as if they did.
"""

from mkcompile.plan.simulate.command import main
from mkcompile.plan.simulate.layout import Layout, Workload
from mkcompile.plan.simulate.models import MODELS, Model, model
from mkcompile.plan.simulate.result import OperatorRow, SimulationResult, StepRow, merge
from mkcompile.plan.simulate.run import default_layout, scaling, simulate
from mkcompile.plan.simulate.sweep import SweepResult, sweep

__all__ = [
    "MODELS",
    "Layout",
    "Model",
    "OperatorRow",
    "SimulationResult",
    "StepRow",
    "SweepResult",
    "Workload",
    "default_layout",
    "main",
    "merge",
    "model",
    "scaling",
    "simulate",
    "sweep",
]
