"""Random programs: rewritten, each computes bit for bit what it did, on every rank."""

from __future__ import annotations

import copy

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from torch.fx.experimental.proxy_tensor import make_fx

from mkcompile.passes.fuse import fuse
from tests.captured import Captured, assert_same_values, fake_group
from tests.passes.programs import Program, function_of, programs, residual_programs, weights_of

# Shrinking takes minutes here; the program that fails is printed.
QUICK = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate],
)


def rewritten(program: Program, tracing_mode: str) -> Captured:
    before = make_fx(function_of(program), tracing_mode=tracing_mode)(*weights_of(program))
    after = copy.deepcopy(before)
    sites = fuse(after.graph)
    after.graph.lint()
    after.recompile()
    return Captured(phase="inference", before=before, after=after, sites=sites)


def check(program: Program, tracing_mode: str) -> Captured:
    graph = rewritten(program, tracing_mode)
    fused = sum(site.operator is not None for site in graph.sites)
    assert fused <= len(graph.sites)
    for node in graph.after.graph.nodes:
        assert "val" in node.meta or node.op == "output", node
    assert_same_values(graph, program.world_size)
    return graph


@given(program=programs())
@settings(QUICK, max_examples=40)
def test_rewritten_programs_compute_the_same(program: Program) -> None:
    with fake_group(program.world_size):
        check(program, "fake")


@given(program=residual_programs())
@settings(QUICK, max_examples=40)
def test_programs_with_residuals_compute_the_same(program: Program) -> None:
    with fake_group(program.world_size):
        check(program, "fake")


@pytest.mark.slow
@given(program=residual_programs())
@settings(QUICK, max_examples=300)
def test_many_programs_with_residuals_compute_the_same(program: Program) -> None:
    with fake_group(program.world_size):
        check(program, "fake")


@pytest.mark.slow
@given(program=programs(max_blocks=4))
@settings(QUICK, max_examples=300)
def test_many_rewritten_programs_compute_the_same(program: Program) -> None:
    with fake_group(program.world_size):
        check(program, "fake")


@given(program=programs(max_blocks=1))
@settings(QUICK, max_examples=5)
def test_rewritten_programs_with_symbolic_sizes_compute_the_same(program: Program) -> None:
    with fake_group(program.world_size):
        check(program, "symbolic")
