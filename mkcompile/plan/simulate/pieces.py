"""Pieces of a step: GEMMs, sites that may be fused, attention, expert layers; each becomes tasks of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import ceil

from mkcompile.ops.problem import Problem
from mkcompile.plan.collective_cost import nccl_us, network_bytes, nvlink_bytes, reduces_in_switch
from mkcompile.plan.constants import constants
from mkcompile.plan.decide import Decision, Policy, decide
from mkcompile.plan.fused_cost import links_us, smooth_max
from mkcompile.plan.gemm_cost import Gemm, cublas_us, elementwise_us
from mkcompile.plan.simulate.engine import Task
from mkcompile.plan.topology import Span, Topology
from mkcompile.plan.unfused_cost import collectives_of

MAIN, SIDE = "compute", "communication"
_BYTES = 2


@dataclass(slots=True, kw_only=True)
class Pieces:
    """Collects tasks; one after the other on the main stream, data parallelism beside it."""

    topology: Topology
    policy: Policy
    fuse: bool
    tasks: list[Task] = field(default_factory=list)
    where: str = ""

    def add(self, task: Task) -> int:
        """Put in a task, as part of the current site; its index."""
        self.tasks.append(replace(task, site=self.where))
        return len(self.tasks) - 1

    def compute(self, name: str, us: float, after: tuple[int, ...] = ()) -> int:
        """Work of the SMs alone."""
        return self.add(Task(name=name, stream=MAIN, seconds=us * 1e-6, compute_s=us * 1e-6, after=after))

    def gemm(self, name: str, m: int, n: int, k: int) -> int:
        """A product without communication."""
        return self.compute(name, cublas_us(Gemm(m=m, n=n, k=k), self.topology.gpu, constants()))

    def elementwise(self, name: str, moved_bytes: float) -> int:
        """A memory-bound kernel."""
        return self.compute(name, elementwise_us(moved_bytes, self.topology.gpu, constants()))

    def collective(
        self, name: str, kind: str, tensor_bytes: float, span: Span, stream: str = MAIN, after: tuple[int, ...] = ()
    ) -> int | None:
        """A collective by NCCL; None where the group has one rank."""
        if span.world_size == 1:
            return None
        us = nccl_us(kind, tensor_bytes, span, self.topology, constants())
        loads = self._loads(kind, tensor_bytes, span, us)
        task = Task(
            name=name, stream=stream, seconds=us * 1e-6, kind="collective", loads=loads, after=after, label=kind
        )
        return self.add(task)

    def _loads(self, kind: str, tensor_bytes: float, span: Span, us: float) -> dict[str, float]:
        """Shares of NVLink and of the NIC while the transfer runs."""
        in_switch = reduces_in_switch(span, self.topology) and span.num_nodes == 1
        nvlink_us = nvlink_bytes(kind, tensor_bytes, span, in_switch) / self.topology.nvlink_gbps * 1e-3
        loads = {"nvlink": min(1.0, nvlink_us / us)}
        if span.num_nodes > 1:
            loads["network"] = min(1.0, network_bytes(kind, tensor_bytes, span) / self.topology.nic_gbps * 1e-3 / us)
        return loads

    def fused(self, name: str, label: str, seconds: float, compute_s: float, loads: dict[str, float]) -> int:
        """One fused launch."""
        task = Task(
            name=name,
            stream=MAIN,
            seconds=seconds,
            kind="fused",
            compute_s=min(compute_s, seconds),
            loads=loads,
            label=label,
        )
        return self.add(task)

    def gains(self, fused_us: float, unfused_us: float) -> bool:
        """Is this to be fused, for operators that `decide` does not know yet?"""
        return self.fuse and (fused_us < unfused_us or self.policy.fuse == "always")

    def site(self, problem: Problem, name: str) -> None:
        """A GEMM with its collective: one fused task where the planner says so, else the kernels one by one."""
        with self.within(name if problem.world_size > 1 else ""):
            self._site(problem, name)

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Tasks of a site; of an inner one where it has one."""
        outer, self.where = self.where, self.where or name
        yield
        self.where = outer

    def takes_whole(self, whole: Problem, parts: Sequence[Problem], between_us: float) -> bool:
        """Is a feed-forward network in one launch predicted to be faster than its parts, each at its best?

        `between_us`: what runs between the parts where they are apart. Answers alike for the step that is not fused.
        """
        if whole.world_size == 1:
            return False
        decision = decide(whole, self.topology, self.policy)
        if decision.refusal is not None or decision.fused_s is None:
            return False
        apart_s = sum(decide(part, self.topology, self.policy).chosen_s for part in parts) + between_us * 1e-6
        return decision.fused_s < apart_s

    def _site(self, problem: Problem, name: str) -> None:
        if problem.world_size == 1:
            self._products(problem, name)
            return
        decision = decide(problem, self.topology, self.policy)
        if self.fuse and decision.refusal is None and decision.fused_s is not None:
            self._fused_site(problem, name, decision)
            return
        span = self.topology.span_of(problem)
        for kind, size in collectives_of(problem):
            if kind == "all_gather":
                self.collective(f"{name} gather", kind, size, span)
        self._products(problem, name)
        for kind, size in collectives_of(problem):
            if kind != "all_gather":
                self.collective(f"{name} {kind}", kind, size, span)

    def _fused_site(self, problem: Problem, name: str, decision: Decision) -> None:
        assert decision.fused_s is not None
        span = self.topology.span_of(problem)
        loads: dict[str, float] = {}
        for kind, size in collectives_of(problem):
            for resource, share in self._loads(kind, size, span, decision.fused_s * 1e6).items():
                loads[resource] = min(1.0, loads.get(resource, 0.0) + share)
        alone = self.products_us(problem) * 1e-6
        label = f"{problem.operator}/{decision.plan.variant}"
        self.fused(name, label, decision.fused_s, alone, loads)

    def products_us(self, problem: Problem) -> float:
        """The GEMMs of a problem by cuBLAS, with the activation between those of an FFN."""
        gpu, known = self.topology.gpu, constants()
        one = Gemm(m=problem.m, n=problem.n, k=problem.hidden or problem.k, dtype_bytes=problem.dtype_bytes)
        total = cublas_us(one, gpu, known) + (problem.num_gemms - 1) * known.gemm_launch_us
        if problem.hidden:
            ups = 2 if problem.gated else 1
            total += cublas_us(replace(one, n=problem.hidden * ups, k=problem.k), gpu, known)
            total += elementwise_us((ups + 1.0) * problem.m * problem.hidden * problem.dtype_bytes, gpu, known)
        return total

    def _products(self, problem: Problem, name: str) -> None:
        self.compute(name, self.products_us(problem))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Scaled dot-product attention of this rank's heads and tokens. `kv_bytes`: keys and values of all tokens."""

    flops: float
    kv_bytes: float
    span: Span

    def add(self, pieces: Pieces, name: str, factor: float = 1.0) -> None:
        """`factor`: work relative to the forward pass. Keys and values are gathered first, or under the computation."""
        known, gpu = constants(), pieces.topology.gpu
        alone_us = self.flops * factor / (gpu.peak_tflops * 1e6 * known.attention_fraction) + known.gemm_launch_us
        if self.span.world_size == 1:
            pieces.compute(name, alone_us)
            return
        pieces.where = name
        self._around(pieces, name, alone_us, factor)
        pieces.where = ""

    def _around(self, pieces: Pieces, name: str, alone_us: float, factor: float) -> None:
        moved = self.kv_bytes * (1 if factor == 1 else 2)
        unfused_us, fused_us, link_us = self.times_us(pieces.topology, alone_us, moved)
        if not pieces.gains(fused_us, unfused_us):
            pieces.collective(f"{name} kv gather", "all_gather", moved, self.span)
            pieces.compute(name, alone_us)
            return
        loads = {"nvlink": min(1.0, link_us / fused_us)}
        pieces.fused(name, "ring_attention", fused_us * 1e-6, alone_us * 1e-6, loads)

    def times_us(self, topology: Topology, alone_us: float, moved_bytes: float) -> tuple[float, float, float]:
        """Keys and values gathered first; under the computation; their transfer alone."""
        known, steps = constants(), self.span.world_size
        link_us = transfer_us("all_gather", moved_bytes, self.span, topology)
        fused_us = smooth_max(alone_us, alone_us / steps + link_us, known) + steps * known.flag_us
        return alone_us + nccl_us("all_gather", moved_bytes, self.span, topology, known), fused_us, link_us


def transfer_us(kind: str, tensor_bytes: float, span: Span, topology: Topology, network: float | None = None) -> float:
    """A transfer by a kernel's own stores and the proxy: NVLink and network side by side.

    `network`: bytes for other nodes, where they are fewer than a plain collective's.
    """
    known = constants()
    nvlink = nvlink_bytes(kind, tensor_bytes, span) / (topology.nvlink_gbps * known.push_fraction) * 1e-3
    sent = network_bytes(kind, tensor_bytes, span) if network is None else network
    if span.num_nodes == 1 or sent <= 0:
        return nvlink
    across = sent / (topology.nic_gbps * known.network_fraction) * 1e-3 + known.proxy_us + topology.nic_latency_us
    return links_us(nvlink, across, known)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayer:
    """Dispatch, two products a expert, combine: `rows` token copies a rank, spread evenly over the experts."""

    rows: int
    top_k: int
    local_experts: int
    hidden: int
    intermediate: int
    span: Span

    def gemm_us(self, n: int, k: int, topology: Topology, factor: int) -> float:
        """The grouped product: rows of each expert rounded up to a tile; all local weights are read."""
        each = ceil(self.rows / self.local_experts / 128) * 128
        gemm = Gemm(m=each * self.local_experts, n=n, k=k)
        weights_us = elementwise_us(float(self.local_experts * n * k * _BYTES), topology.gpu, constants())
        return factor * max(cublas_us(gemm, topology.gpu, constants()), weights_us)

    def remote_node_copies(self) -> float:
        """Copies of a token that cross to other nodes, one a node: fewer than its experts."""
        nodes = self.span.num_nodes
        return (nodes - 1) * (1 - (1 - 1 / nodes) ** self.top_k)

    def add(self, pieces: Pieces, name: str, factor: int = 1) -> None:
        """`factor`: products relative to the forward pass (2 in the backward pass)."""
        known, topology = constants(), pieces.topology
        up_us = self.gemm_us(2 * self.intermediate, self.hidden, topology, factor)
        down_us = self.gemm_us(self.hidden, self.intermediate, topology, factor)
        moved = float(self.rows * self.hidden * _BYTES)
        activation = 3.0 * self.rows * self.intermediate * _BYTES * factor
        permute_us = elementwise_us(2 * moved, topology.gpu, known)
        activation_us = elementwise_us(activation, topology.gpu, known)
        halves = (
            (f"{name} dispatch + up", "moe_dispatch_gemm", up_us, activation_us),
            (f"{name} down + combine", "moe_gemm_combine", down_us, 0.0),
        )
        for part, operator, product_us, after_us in halves:
            pieces.where = part
            fused_us, loads = self.fused_us(topology, product_us)
            exchange_us = nccl_us("all_to_all", moved, self.span, topology, known)
            together = self.span.world_size > 1
            if together and pieces.gains(fused_us, product_us + after_us + permute_us + exchange_us):
                pieces.fused(part, operator, fused_us * 1e-6, product_us * 1e-6, loads)
                continue
            pieces.compute(f"{part}: permute", permute_us)
            pieces.collective(f"{part}: exchange", "all_to_all", moved, self.span)
            pieces.compute(f"{part}: products", product_us)
            if after_us:
                pieces.compute(f"{part}: activation", after_us)
        pieces.where = ""

    def fused_us(self, topology: Topology, product_us: float) -> tuple[float, dict[str, float]]:
        """Microseconds of a product with its exchange, and the loads on links."""
        known = constants()
        moved = float(self.rows * self.hidden * _BYTES)
        network = self.rows / self.top_k * self.hidden * _BYTES * self.remote_node_copies()
        link_us = transfer_us("all_to_all", moved, self.span, topology, network)
        fill_us = product_us / max(1, self.local_experts)
        fused_us = smooth_max(product_us, link_us + fill_us, known) + 2 * known.flag_us
        loads = {"nvlink": min(1.0, link_us / fused_us)}
        if self.span.num_nodes > 1:
            loads["network"] = min(1.0, network / topology.nic_gbps * 1e-3 / fused_us)
        return fused_us, loads
