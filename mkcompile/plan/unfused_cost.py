"""How long the graph takes as it is: cuBLAS, NCCL and what memory-bound kernels stand between them. Microseconds."""

from __future__ import annotations

from mkcompile.ops.problem import Problem
from mkcompile.plan.collective_cost import nccl_us
from mkcompile.plan.constants import Constants
from mkcompile.plan.gemm_cost import Gemm, cublas_us, elementwise_us
from mkcompile.plan.topology import Span, Topology


def collectives_of(problem: Problem) -> list[tuple[str, int]]:
    """The collectives of the site as it is, each with its whole tensor's bytes."""
    rows_in, rows_out = problem.m * problem.k * problem.dtype_bytes, problem.m * problem.n * problem.result_bytes
    if problem.operator == "all_gather_gemm":
        return [("all_gather", rows_in)]
    if problem.operator == "ffn":
        gather = [("all_gather", rows_in)] if problem.gathers else []
        return [*gather, ("reduce_scatter" if problem.scatters else "all_reduce", rows_out)]
    return [("all_reduce" if problem.operator == "gemm_all_reduce" else "reduce_scatter", rows_out)]


def unfused_us(problem: Problem, span: Span, topology: Topology, constants: Constants) -> float:
    """All kernels of the site, one after the other."""
    if problem.operator == "ffn":
        return _ffn_us(problem, span, topology, constants)
    gemm = Gemm(m=problem.m, n=problem.n, k=problem.k, dtype_bytes=problem.dtype_bytes)
    product = cublas_us(gemm, topology.gpu, constants) + (problem.num_gemms - 1) * constants.gemm_launch_us
    ((kind, tensor_bytes),) = collectives_of(problem)
    total = product + nccl_us(kind, tensor_bytes, span, topology, constants)
    if kind == "all_gather":
        return total + _reorder_us(problem, tensor_bytes, topology, constants)
    # each further product of a sum reads the running total and writes it again
    total += elementwise_us(3.0 * tensor_bytes * (problem.num_gemms - 1), topology.gpu, constants)
    return total + (_reorder_us(problem, tensor_bytes, topology, constants) if kind == "reduce_scatter" else 0.0)


def _reorder_us(problem: Problem, tensor_bytes: int, topology: Topology, constants: Constants) -> float:
    """NCCL gathers and scatters the first dimension; another one costs a copy."""
    if problem.outer == 1 and problem.dim == "rows":
        return 0.0
    return elementwise_us(2.0 * tensor_bytes, topology.gpu, constants)


def _ffn_us(problem: Problem, span: Span, topology: Topology, constants: Constants) -> float:
    ups = 2 if problem.gated else 1
    up = Gemm(m=problem.m, n=problem.hidden * ups, k=problem.k, dtype_bytes=problem.dtype_bytes)
    down = Gemm(m=problem.m, n=problem.n, k=problem.hidden, dtype_bytes=problem.dtype_bytes)
    hidden_bytes = problem.m * problem.hidden * problem.dtype_bytes
    total = cublas_us(up, topology.gpu, constants) + cublas_us(down, topology.gpu, constants)
    total += elementwise_us((ups + 1) * hidden_bytes, topology.gpu, constants)
    return total + sum(nccl_us(kind, size, span, topology, constants) for kind, size in collectives_of(problem))
