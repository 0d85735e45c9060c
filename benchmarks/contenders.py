"""Who is compared: each contender is a call that computes the same result into memory of its own.

cuBLAS + NCCL; cuBLAS + the one-shot and two-shot all-reduce of torch's symmetric memory; torch's fused GEMM +
reduce-scatter (asynchronous tensor parallelism); this project's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mkcompile.runtime.kernel import LaunchArguments, PreparedLaunch, compile_kernel, load_kernel
from mkcompile.runtime.kernel_config import Broadcast, KernelConfig, OperatorName
from mkcompile.runtime.tactics import Tactic
from mkcompile.runtime.tensor_map import Matrix
from mkcompile.runtime.tile_schedule import LaunchSize, choose_schedule, choose_tile

from . import gather_contenders
from .gather_contenders import Gatherer
from .planned import planned_tactic
from .shapes import Shape
from .workspaces import Arena, symmetric_matrix

_SM_RESERVE = 4
_HOPS = {"gemm": 0, "gemm_reduce_scatter": 1, "gemm_all_reduce": 2, "all_gather_gemm": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """`call` returns the result; `variant` says how, as far as that varies."""

    name: str
    call: Callable[[], torch.Tensor]
    variant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """x [M, K], w [N, K]."""

    x: torch.Tensor
    w: torch.Tensor


def cublas(operands: Operands) -> Contender:
    """The GEMM alone."""
    out = operands.x.new_empty(operands.x.shape[0], operands.w.shape[0])
    return Contender(name="cublas", call=lambda: torch.mm(operands.x, operands.w.t(), out=out))


def beside_copies(operands: Operands, arena: Arena, num_bytes: float) -> Contender:
    """The GEMM alone while copy engines send this rank's bytes: nobody waits for anybody.

    No contender but a bound: what the chip's power leaves of max(GEMM, link).
    """
    out, copies = operands.x.new_empty(operands.x.shape[0], operands.w.shape[0]), arena.copies(num_bytes)
    beside = torch.cuda.Stream()

    def call() -> torch.Tensor:
        main = torch.cuda.current_stream()
        beside.wait_stream(main)
        with torch.cuda.stream(beside):
            for target, source in copies:
                target.copy_(source)
        torch.mm(operands.x, operands.w.t(), out=out)
        main.wait_stream(beside)
        return out

    return Contender(name="cublas_beside_copies", call=call)


def _tactic(base: KernelConfig, size: LaunchSize) -> Tactic:
    """By the planner. A GEMM alone, which no operator launches, by the kernels' own model, on all SMs: it waits for
    no peer.
    """
    if base.reduces:
        return planned_tactic(base, size, _SM_RESERVE, streams=False)
    num_sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    config = choose_tile(base, size, num_sms)
    return config, choose_schedule(config, size, num_sms)


def ours(operator: OperatorName, operands: Operands, arena: Arena | None, broadcast: Broadcast = "none") -> Contender:
    """This project's kernel for many rows, as it would be launched."""
    (m, k), n = operands.x.shape, operands.w.shape[0]
    size = LaunchSize(m=m, n=n, k=k, world=arena.world if arena else 1)
    config, schedule = _tactic(KernelConfig(operator=operator, broadcast=broadcast), size)
    rows = m // size.world if operator == "gemm_reduce_scatter" else m
    outs: tuple[int, ...] = ()
    if broadcast == "direct":
        out, outs = symmetric_matrix(rows, n, operands.x.dtype)
    else:
        out = operands.x.new_empty(rows, n)
    arguments = LaunchArguments(
        terms=((Matrix.of(operands.x), Matrix.of(operands.w)),), out=Matrix.of(out), schedule=schedule,
        peers=arena.peers(outs) if arena else None,
    )  # fmt: skip
    prepared = PreparedLaunch(load_kernel(compile_kernel(config), torch.cuda.current_device()), arguments)
    stream = torch.cuda.current_stream().cuda_stream

    def call() -> torch.Tensor:
        prepared.run(stream)
        return out

    name = "mkcompile" if broadcast == "none" else f"mkcompile_{broadcast}"
    lag = f" lag{schedule.lag} pace{schedule.pace_ns}" if size.world > 1 else ""
    return Contender(name=name, call=call, variant=f"{config.block_m}x{config.block_n} grid{schedule.grid}{lag}")


def reduce_scatter_contenders(operands: Operands, arena: Arena) -> Iterator[Contender]:
    """All ways to GEMM + reduce-scatter."""
    group = arena.group.group_name
    product = operands.x.new_empty(operands.x.shape[0], operands.w.shape[0])
    out = operands.x.new_empty(operands.x.shape[0] // arena.world, operands.w.shape[0])

    def nccl() -> torch.Tensor:
        torch.mm(operands.x, operands.w.t(), out=product)
        dist.reduce_scatter_tensor(out, product)
        return out

    yield Contender(name="cublas_nccl", call=nccl)
    fused = torch.ops.symm_mem.fused_matmul_reduce_scatter
    yield Contender(name="async_tp", call=lambda: fused(operands.x, operands.w.t(), "sum", 0, group))
    yield ours("gemm_reduce_scatter", operands, arena)


def all_reduce_contenders(operands: Operands, arena: Arena) -> Iterator[Contender]:
    """All ways to GEMM + all-reduce."""
    group = arena.group.group_name
    (m, _), n = operands.x.shape, operands.w.shape[0]
    product = operands.x.new_empty(m, n)
    symmetric, _ = symmetric_matrix(m, n, operands.x.dtype)

    def nccl() -> torch.Tensor:
        torch.mm(operands.x, operands.w.t(), out=product)
        dist.all_reduce(product)
        return product

    def two_shot() -> torch.Tensor:
        torch.mm(operands.x, operands.w.t(), out=symmetric)
        result: torch.Tensor = torch.ops.symm_mem.two_shot_all_reduce_(symmetric, "sum", group)
        return result

    def one_shot() -> torch.Tensor:
        torch.mm(operands.x, operands.w.t(), out=symmetric)
        result: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(symmetric, "sum", group)
        return result

    yield Contender(name="cublas_nccl", call=nccl)
    yield Contender(name="cublas_two_shot", call=two_shot)
    yield Contender(name="cublas_one_shot", call=one_shot)
    yield ours("gemm_all_reduce", operands, arena, "direct")
    yield ours("gemm_all_reduce", operands, arena, "staged")


def all_gather_contenders(operands: Operands, arena: Arena) -> Iterator[Contender]:
    """All ways to all-gather + GEMM; `operands.x` are the gathered rows, of which each rank has its own."""
    rows = operands.x.shape[0] // arena.world
    shard = operands.x[arena.rank * rows : (arena.rank + 1) * rows].clone()
    gathered, out = torch.empty_like(operands.x), shard.new_empty(operands.x.shape[0], operands.w.shape[0])
    for name, call in gather_contenders.others(shard, operands.w, arena.group.group_name, gathered, out):
        yield Contender(name=name, call=call)
    gatherer = Gatherer.of(arena, shard.numel() * 2 * (arena.world - 1))
    for name, call, text in gather_contenders.ours(shard, operands.w, gatherer):
        yield Contender(name=name, call=call, variant=text)


def sent_bytes(op: str, shape: Shape, world: int) -> float:
    """What each rank has to send."""
    crossing = shape.m * (shape.k if op == "all_gather_gemm" else shape.n) * 2
    return _HOPS[op] * crossing * (world - 1) / world


def contenders(op: str, shape: Shape, operands: Operands, arena: Arena | None) -> list[Contender]:
    """Everyone who takes part in an operator's comparison; cuBLAS's GEMM first, for the ceiling."""
    base = cublas(operands)
    if op == "gemm":
        return [base, ours("gemm", operands, None)]
    assert arena is not None, f"{op} takes more than one rank"
    of_op = {
        "gemm_reduce_scatter": reduce_scatter_contenders, "gemm_all_reduce": all_reduce_contenders,
        "all_gather_gemm": all_gather_contenders,
    }[op]  # fmt: skip
    return [base, beside_copies(operands, arena, sent_bytes(op, shape, arena.world)), *of_op(operands, arena)]
