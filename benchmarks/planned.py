"""What the runtime would launch for a problem: benchmarks never choose."""

from __future__ import annotations

from mkcompile.ops.problem import Problem
from mkcompile.plan.decide import Policy, decide
from mkcompile.plan.topology import preset
from mkcompile.runtime.form import Form
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.tactics import Tactic, from_plan
from mkcompile.runtime.tile_schedule import LaunchSize


def planned_tactic(config: KernelConfig, size: LaunchSize, reserve_sms: int, streams: bool) -> Tactic:
    """By the planner, of the kernels that store results in the config's way, and of those for few rows if `streams`."""
    problem = Problem(
        operator=config.operator, m=size.m, n=size.n, k=size.k, world_size=size.world, dtype="bfloat16", dtype_bytes=2
    )
    variants = ["push" if config.operator == "gemm_reduce_scatter" else config.broadcast, *(["stream"] * streams)]
    available = frozenset(f"{config.operator}/{variant}" for variant in variants)
    topology = preset("2xh200")
    plan = decide(problem, topology, Policy(fuse="always", reserve_sms=reserve_sms, available=available)).plan
    form = Form(config=config, size=size, out_shape=(size.m, size.n), scale=1.0)
    tactic = from_plan(form, plan, topology.gpu.num_sms - reserve_sms)
    assert tactic is not None, plan
    return tactic
