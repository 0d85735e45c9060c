"""Fuse or not, and how: `decide` for one problem. Pure arithmetic, no communication.

The same arguments give the same decision on every rank and in every process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from mkcompile.config import FusePolicy
from mkcompile.ops.problem import Problem
from mkcompile.plan.candidates import TILES, Candidate, Site, candidates
from mkcompile.plan.collective_cost import network_bytes, nvlink_bytes, reduces_in_switch
from mkcompile.plan.constants import constants
from mkcompile.plan.gemm_cost import Gemm, cublas_us
from mkcompile.plan.plan import UNFUSED, Plan, Refusal, Roles
from mkcompile.plan.topology import Topology
from mkcompile.plan.unfused_cost import collectives_of, unfused_us

KERNEL_DTYPES = ("bfloat16", "float16")
MAX_TERMS = 4
# The model is about 5 % off for large problems and 10 % for small ones: gains below that are not believed.
MARGIN_FRACTION = 0.03
# Over nodes NCCL is assumed, and our bytes and its bytes are taken to go equally fast.
MARGIN_ACROSS_FRACTION = 0.05
MARGIN_S = 1.5e-6
TINY_BYTES = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the planner may do.

    `available`: names of the kernels that exist, as `operator/variant` or `operator/variant/tile`; None: all that the
    planner knows. `reserve_sms`: SMs that a launch leaves to other kernels. `max_ranks`: of a group that kernels join;
    0: any number.
    """

    fuse: FusePolicy = "auto"
    reserve_sms: int = 4
    available: frozenset[str] | None = None
    max_ranks: int = 0

    def allows(self, plan: Plan) -> bool:
        """Is there such a kernel?"""
        if self.available is None:
            return True
        return plan.name in self.available or f"{plan.operator}/{plan.variant}" in self.available


DEFAULT_POLICY = Policy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Predicted times of both sides and what follows from them.

    `fused_s` is the best candidate's time, also where the decision is against it, and None where there is no candidate.
    `ceiling_s`: the GEMM alone or the link alone, whichever is longer. `measured`: both times are `tune`'s and not
    predicted. Units: seconds.
    """

    problem: Problem
    unfused_s: float
    ceiling_s: float
    plan: Plan
    fused_s: float | None = None
    refusal: Refusal | None = None
    detail: str = ""
    measured: bool = False

    @property
    def saving_s(self) -> float:
        """Seconds saved by fusing; 0 where nothing is fused."""
        return 0.0 if self.refusal is not None or self.fused_s is None else self.unfused_s - self.fused_s

    @property
    def chosen_s(self) -> float:
        """Time of what was decided."""
        return self.unfused_s if self.refusal is not None or self.fused_s is None else self.fused_s


def ceiling_us(problem: Problem, topology: Topology) -> float:
    """cuBLAS's GEMM alone, or the bytes over a link at a plain copy's rate: nothing is taken to be faster.

    Source: `benchmarks/results/2xh200/ops-baseline.json` (p2p_push_bidir) for the copy's rate.
    """
    topology = topology.reaching(problem.num_nodes)
    known, gpu, span = constants(), topology.gpu, topology.span_of(problem)
    products = [Gemm(m=problem.m, n=problem.n, k=problem.hidden or problem.k, dtype_bytes=problem.dtype_bytes)]
    if problem.hidden:
        width = problem.hidden * (2 if problem.gated else 1)
        products.append(replace(products[0], n=width, k=problem.k))
    gemm_us = sum(cublas_us(one, gpu, known) for one in products) - known.gemm_launch_us * (len(products) - 1)
    crossings = collectives_of(problem)
    in_switch = reduces_in_switch(span, topology)
    nvlink = sum(nvlink_bytes(kind, size, span, in_switch) for kind, size in crossings)
    network = sum(network_bytes(kind, size, span) for kind, size in crossings)
    link_us = nvlink / (topology.nvlink_gbps * known.copy_best_fraction) * 1e-3
    network_us = network / topology.nic_gbps * 1e-3 if network else 0.0
    return max(gemm_us, link_us, network_us)


def check(problem: Problem, topology: Topology) -> tuple[Refusal, str] | None:
    """Why no kernel can take the problem at all, whatever it would gain."""
    span = topology.span_of(problem)
    if problem.world_size == 1:
        return Refusal.ONE_RANK, ""
    if topology.gpu.arch == "cpu":
        return None
    if span.world_size != problem.world_size:
        return Refusal.UNEVEN_NODES, f"{problem.world_size} ranks on {span.num_nodes} nodes"
    if span.num_nodes > 1 and not topology.transport:
        return Refusal.NO_NETWORK_KERNEL, (
            "name a network and give it queues: MKCOMPILE_NETWORK=rc, srd or tcp, CUDA_DEVICE_MAX_CONNECTIONS=32 "
            "(docs/across_nodes.md)"
        )
    if not topology.p2p and span.per_node > 1:
        return Refusal.NO_P2P, topology.name
    if problem.dtype not in KERNEL_DTYPES:
        return Refusal.DTYPE, problem.dtype
    if problem.weight_products == problem.num_gemms:
        return Refusal.WEIGHT_PRODUCT, f"all {problem.num_gemms}"
    if problem.weight_layout not in ("nk", "kn"):
        return Refusal.LAYOUT, f"weight layout {problem.weight_layout}"
    if min(problem.n, problem.k) == 0:
        return Refusal.SHAPE, "n and k must be known when the model is compiled"
    for name, size in (("n", problem.n), ("k", problem.k), ("hidden", problem.hidden)):
        if size % 8:
            return Refusal.LAYOUT, f"{name}={size}"
    return _check_shape(problem)


def _check_shape(problem: Problem) -> tuple[Refusal, str] | None:
    if problem.dim == "columns":
        return Refusal.SHAPE, "along the last dimension"
    if problem.num_gemms > MAX_TERMS and problem.operator != "all_gather_gemm":
        return Refusal.SHAPE, f"{problem.num_gemms} products in one sum"
    divided = problem.operator in ("gemm_reduce_scatter", "all_gather_gemm") or problem.gathers or problem.scatters
    if divided and problem.m % (problem.world_size * max(problem.outer, 1)):
        return Refusal.SHAPE, f"m={problem.m} over {problem.world_size} ranks"
    return None


@lru_cache(maxsize=4096)
def decide(problem: Problem, topology: Topology, policy: Policy = DEFAULT_POLICY) -> Decision:
    """The decision for one problem with a known m (see `plan.table` for a symbolic one).

    Raises: ValueError where m is 0.
    """
    if problem.m < 1:
        raise ValueError(f"decide needs m; got {problem}")
    topology = topology.reaching(problem.num_nodes)
    span = topology.span_of(problem)
    sized = min(problem.n, problem.k) > 0
    base = Decision(
        problem=problem,
        unfused_s=unfused_us(problem, span, topology, constants()) * 1e-6 if sized else 0.0,
        ceiling_s=ceiling_us(problem, topology) * 1e-6 if sized else 0.0,
        plan=unfused_plan(problem, topology),
    )
    refused = check(problem, topology)
    if refused is not None:
        return replace(base, refusal=refused[0], detail=refused[1])
    if topology.gpu.arch == "cpu":
        return _by_reference(base, policy)
    if 0 < policy.max_ranks < problem.world_size:
        detail = f"{problem.world_size} ranks, at most {policy.max_ranks}"
        return replace(base, refusal=Refusal.TOO_MANY_RANKS, detail=detail)
    part = part_of_kernels(problem)
    best = best_candidate(part, topology, policy)
    if best is None:
        missing = Refusal.NO_NETWORK_KERNEL if span.num_nodes > 1 else Refusal.NO_KERNEL
        return replace(base, refusal=missing, detail=problem.operator)
    behind_us = base.unfused_s * 1e6 - unfused_us(part, span, topology, constants()) if part is not problem else 0.0
    margin = MARGIN_FRACTION if span.num_nodes == 1 else MARGIN_ACROSS_FRACTION
    return _weigh(base, replace(best, seconds=best.seconds + behind_us * 1e-6), policy, margin)


def part_of_kernels(problem: Problem) -> Problem:
    """What a kernel makes where the library makes products of the transposed gathered tensor behind it; all products
    are taken to be equally wide (see `AllGatherGemm.of_kernels`).
    """
    inputs = problem.num_gemms - problem.weight_products
    if not problem.weight_products or not inputs:
        return problem
    n = problem.n * inputs // problem.num_gemms
    return replace(problem, n=n, num_gemms=inputs, weight_products=0, returns_gathered=True)


def best_candidate(
    problem: Problem, topology: Topology, policy: Policy, names: frozenset[str] | None = None
) -> Candidate | None:
    """The fastest that the policy allows, of these kernels (see `Plan.name`) or of all; the first of equals.

    A reduction of few rows is by a kernel for few rows unless another gains what is believed (decision 206).
    """
    site = Site(problem=problem, topology=topology.reaching(problem.num_nodes), reserve_sms=policy.reserve_sms)
    allowed = [one for one in candidates(site) if policy.allows(one.plan) and (names is None or one.plan.name in names)]
    best = min(allowed, key=lambda one: one.seconds, default=None)
    streams = [one for one in allowed if one.plan.variant == "stream"]
    if best is None or not streams or problem.operator == "all_gather_gemm":
        return best
    known = min(streams, key=lambda one: one.seconds)
    return known if best.seconds > known.seconds * (1 - MARGIN_FRACTION) else best


def _weigh(base: Decision, best: Candidate, policy: Policy, margin: float) -> Decision:
    # both are predictions: where they contradict each other the more careful one counts
    best = replace(best, seconds=max(best.seconds, base.ceiling_s))
    gains = best.seconds < base.unfused_s * (1 - margin) - MARGIN_S
    if gains or policy.fuse == "always":
        return replace(base, plan=best.plan, fused_s=best.seconds)
    tiny = base.problem.sent_bytes < TINY_BYTES
    detail = f"predicted {best.seconds * 1e6:.1f} us fused, {base.unfused_s * 1e6:.1f} us unfused"
    return replace(base, fused_s=best.seconds, refusal=Refusal.TINY_PAYLOAD if tiny else Refusal.NO_GAIN, detail=detail)


def _by_reference(base: Decision, policy: Policy) -> Decision:
    """On the CPU an operator is its reference: as fast as the graph that it replaces."""
    if policy.fuse == "always":
        return replace(base, fused_s=base.unfused_s, plan=replace(base.plan, variant="reference"))
    return replace(base, fused_s=base.unfused_s, refusal=Refusal.NO_GAIN, detail="no fused kernels on the CPU")


def unfused_plan(problem: Problem, topology: Topology) -> Plan:
    """cuBLAS and NCCL."""
    return Plan(
        operator=problem.operator,
        variant=UNFUSED,
        world_size=problem.world_size,
        tile=TILES[0],
        stages=0,
        roles=Roles(compute=topology.gpu.num_sms),
        transport="nccl",
    )
