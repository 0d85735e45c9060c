"""Operator calls made up from a problem, and their reference timed on CPU tensors: what `tune` does without GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mkcompile.errors import OperatorInputError
from mkcompile.ops.all_gather_gemm import AllGatherGemm
from mkcompile.ops.ffn import Ffn
from mkcompile.ops.gemm_all_reduce import GemmAllReduce
from mkcompile.ops.gemm_reduce_scatter import GemmReduceScatter
from mkcompile.ops.problem import Problem
from mkcompile.ops.registry import Call
from mkcompile.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """Makes tensors for calls: on which device, with which seed, for which group. On `meta` they are shapes alone."""

    group: str
    device: str = "cpu"
    seed: int = 0

    def call(self, problem: Problem) -> Call:
        """A call of the problem's operator with random tensors.

        Raises: OperatorInputError for an operator that is not known here.
        """
        makers: dict[str, Callable[[Problem], Call]] = {
            "gemm_all_reduce": self._all_reduce,
            "gemm_reduce_scatter": self._reduce_scatter,
            "all_gather_gemm": self._all_gather,
            "ffn": self._ffn,
        }
        if problem.operator not in makers or problem.scales:
            what = f"{problem.operator!r} of {problem.dtype}" if problem.scales else repr(problem.operator)
            raise OperatorInputError(f"no tensors can be made for operator {what}")
        return makers[problem.operator](problem)

    def tensor(self, problem: Problem, *shape: int) -> Tensor:
        """Small random values, so that sums stay finite in every dtype."""
        if self.device == "meta":
            return torch.empty(shape, dtype=getattr(torch, problem.dtype), device="meta")
        generator = torch.Generator(device=self.device).manual_seed(self.seed)
        values = torch.randn(shape, generator=generator, device=self.device) * 0.1
        return values.to(getattr(torch, problem.dtype))

    def weight(self, problem: Problem, k: int, n: int) -> Tensor:
        """A [k, n] weight in the problem's layout."""
        return self.tensor(problem, k, n) if problem.weight_layout == "kn" else self.tensor(problem, n, k).t()

    def _terms(self, problem: Problem) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        count = problem.num_gemms
        depths = [problem.k // count + (1 if i < problem.k % count else 0) for i in range(count)]
        x = [self.tensor(problem, problem.m, k) for k in depths]
        w = [self.weight(problem, k, problem.n) for k in depths]
        return x, w, self.tensor(problem, problem.n) if problem.has_bias else None

    def _all_reduce(self, problem: Problem) -> Call:
        x, w, bias = self._terms(problem)
        return GemmAllReduce(x, w, bias, problem.reduce_op, problem.world_size, self.group, problem.key())

    def _reduce_scatter(self, problem: Problem) -> Call:
        x, w, bias = self._terms(problem)
        shape, dim = self._scattered(problem)
        return GemmReduceScatter(
            x, w, bias, shape, dim, problem.reduce_op, problem.world_size, self.group, problem.key()
        )

    def _scattered(self, problem: Problem) -> tuple[list[int], int]:
        """The product's shape and the dimension that is scattered."""
        if problem.dim == "columns":
            return [problem.m, problem.n], 1
        return [problem.outer, problem.m // problem.outer, problem.n], 1

    def _all_gather(self, problem: Problem) -> Call:
        rows, world = problem.m // problem.outer, problem.world_size
        columns = problem.dim == "columns"
        shape = (problem.m, problem.k // world) if columns else (problem.outer, rows // world, problem.k)
        count = problem.num_gemms
        widths = [problem.n // count + (1 if i < problem.n % count else 0) for i in range(count)]
        w = [self.weight(problem, problem.k, width) for width in widths]
        bias = [self.tensor(problem, width) if problem.has_bias else None for width in widths]
        gathered = problem.returns_gathered
        x = self.tensor(problem, *shape)
        return AllGatherGemm(x, w, bias, [0] * count, 1, gathered, world, self.group, problem.key())

    def _ffn(self, problem: Problem) -> Call:
        world = problem.world_size
        x = self.tensor(problem, problem.m // world if problem.gathers else problem.m, problem.k)
        ups = 2 if problem.gated else 1
        w_up = [self.weight(problem, problem.k, problem.hidden) for _ in range(ups)]
        bias_up = [self.tensor(problem, problem.hidden) if problem.has_bias else None for _ in range(ups)]
        w_down = self.weight(problem, problem.hidden, problem.n)
        bias_down = self.tensor(problem, problem.n) if problem.has_bias else None
        shape, dim = self._scattered(problem) if problem.scatters else ([], -1)
        return Ffn(
            x, w_up, bias_up, w_down, bias_down, problem.activation, problem.gated, [False] * (2 + ups),
            0 if problem.gathers else -1, shape, dim, problem.reduce_op, world, self.group, problem.key(),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceMeasurer:
    """Times an operator's reference on CPU tensors, whatever the plan says."""

    maker: Maker

    def ahead(self, work: Sequence[tuple[Problem, Plan]]) -> None:
        """Nothing is to be compiled."""

    def prepare(self, problem: Problem, plan: Plan) -> Callable[[], float]:
        """Raises: OperatorInputError, GroupError."""
        call = self.maker.call(problem)
        call.check()

        def run() -> float:
            started = time.perf_counter()
            call.reference()
            return time.perf_counter() - started

        return run
