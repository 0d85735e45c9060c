"""Kernels compiled ahead are those that the planner can choose, no fewer and no more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from mkcompile.ops.problem import Problem
from mkcompile.plan.candidates import candidates
from mkcompile.plan.decide import Policy, best_candidate, decide
from mkcompile.plan.gather import GATHER_TILES
from mkcompile.plan.kernels import AVAILABLE
from mkcompile.plan.plan import Plan
from mkcompile.plan.site import Site
from mkcompile.plan.topology import Topology, preset
from mkcompile.runtime.form import Form
from mkcompile.runtime.gather_form import GatherForm
from mkcompile.runtime.gather_launch import GatherSize
from mkcompile.runtime.kernel_config import KernelConfig, Network
from mkcompile.runtime.offered import all_configs, launched_configs
from mkcompile.runtime.tactics import from_plan, gather_from_plan
from mkcompile.runtime.tile_schedule import LaunchSize
from tests.plan.problems import problem

#: What `Planned` may choose from: results that stay in their graph are stored `direct`.
POLICY = Policy(fuse="always", reserve_sms=4, available=AVAILABLE | {"gemm_all_reduce/direct"})
OPERATORS = ("gemm_reduce_scatter", "gemm_all_reduce", "all_gather_gemm")
ROWS = (2, 64, 128, 256, 512, 1024, 8192)
WIDTHS = (64, 512, 1280, 8192)
DEPTHS = (256, 8192)
#: How many weights of an all-gather, whether one of them is wider, and whether the gathered rows are a result.
GATHERS = ((1, False, False), (2, False, False), (3, True, False), (1, False, True))


def problems(network: Network) -> Iterator[tuple[Problem, Topology]]:
    """Sizes of all kinds, of two and eight ranks; over nodes of one rank or of two."""
    machine = preset("2xh200") if network == "none" else replace(preset("2xh200"), transport="rc", nic_gbps=50.0)
    lies = {"none": [(2, 0, 0), (8, 0, 0)], "flat": [(2, 2, 1)], "hierarchical": [(4, 2, 2)]}[network]
    for operator, m, n, k, (world, nodes, per_node) in product(OPERATORS, ROWS, WIDTHS, DEPTHS, lies):
        one = problem(operator, m * (world if operator == "all_gather_gemm" else 1), n, k, world_size=world)
        if m % world and operator == "gemm_reduce_scatter":
            continue
        here = replace(machine, gpus_per_node=max(2, world)) if network == "none" else machine
        here = here if network == "none" else replace(here, gpus_per_node=per_node)
        yield replace(one, num_nodes=nodes, per_node=per_node), here.reaching(nodes)


def launched(one: Problem, plan: Plan, network: Network) -> Iterator[KernelConfig]:
    """What a call of this size launches by the plan."""
    if one.operator == "all_gather_gemm":
        yield from gathered(one, plan, network)
        return
    size = LaunchSize(m=one.m, n=one.n, k=one.k, world=one.world_size)
    bases = [KernelConfig(operator="gemm_reduce_scatter", network=network)]
    if one.operator == "gemm_all_reduce":
        bases = [KernelConfig(operator="gemm_all_reduce", broadcast="staged", network=network)]
        bases += [KernelConfig(operator="gemm_all_reduce", broadcast="direct")] if network == "none" else []
    for base in bases:
        tactic = from_plan(Form(config=base, size=size, out_shape=(1, 1), scale=1.0), plan, 128)
        if tactic is not None:
            yield tactic[0]


def gathered(one: Problem, plan: Plan, network: Network) -> Iterator[KernelConfig]:
    base = KernelConfig(operator="all_gather_gemm", network=network)
    for weights, wider, returned in GATHERS:
        if wider and plan.tile != GATHER_TILES[0]:  # the tile is chosen anew, whatever the plan's
            continue
        n = tuple(one.n // (weights + wider) // 8 * 8 * (1 + (wider and i == 0)) for i in range(weights))
        size = GatherSize(segment_rows=one.m // one.world_size, k=one.k, n=n, world=one.world_size)
        form = GatherForm(config=base, size=size, gathered_shape=(one.m, one.k) if returned else ())
        choice = gather_from_plan(form, plan, 128)
        if choice is not None and choice.variant != "library":
            yield choice.config


@pytest.mark.parametrize("network", ["none", "flat", "hierarchical"])
def test_what_the_planner_can_choose_is_compiled_ahead_and_nothing_else(network: Network) -> None:
    chosen: set[KernelConfig] = set()
    for one, topology in problems(network):
        site = Site(problem=one, topology=topology, reserve_sms=POLICY.reserve_sms)
        for candidate in candidates(site):
            if POLICY.allows(candidate.plan):
                chosen.update(launched(one, candidate.plan, network))
    listed = {config for config in launched_configs(["bfloat16"], ["nk"], [network]) if not config.has_bias}
    assert {one.name for one in chosen} == {one.name for one in listed}


def test_gathers_that_share_a_tile_among_four_are_compiled_ahead() -> None:
    """They were left out once: the planner takes them for 1280 columns."""
    names = {one.name for one in launched_configs(["bfloat16"], ["nk"])}
    for rows, kernel in ((2, "64x64"), (16, "64x64"), (64, "64x64"), (128, "128x64")):
        one = problem("all_gather_gemm", rows, 1280, 8192)
        best = best_candidate(one, preset("2xh200"), POLICY)
        assert best is not None and best.plan.name == f"all_gather_gemm/stream/{kernel}x64/4"
        assert {config.name for config in launched(one, best.plan, "none")} <= names


def test_a_decision_is_one_of_the_candidates() -> None:
    one = problem("gemm_reduce_scatter", 64, 3584, 8192)
    site = Site(problem=one, topology=preset("2xh200"), reserve_sms=POLICY.reserve_sms)
    assert decide(one, preset("2xh200"), POLICY).plan in [candidate.plan for candidate in candidates(site)]


def test_configurations_have_names_of_their_own() -> None:
    names = [config.name for config in all_configs()]
    assert len(names) == len(set(names))
