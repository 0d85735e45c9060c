"""Who is compared at few rows: each contender is a call for each weight of a rotation, into memory of its own.

Legend: M rows, N columns, K summed on each rank; W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mkcompile.runtime.kernel import LaunchArguments, PreparedLaunch, compile_kernel, load_kernel
from mkcompile.runtime.kernel_config import KernelConfig, OperatorName
from mkcompile.runtime.tensor_map import Matrix
from mkcompile.runtime.tile_schedule import LaunchSize, TileSchedule, choose_schedule, choose_tile

from .shapes import Shape
from .workspaces import Arena, symmetric_matrix

#: Shapes of /baselines: rows from one decoded token to a short prefill, by down projections of 8 and 70 billion models.
SHAPES = tuple(
    Shape(m, n, k)
    for n, k in ((8192, 3584), (8192, 1024), (4096, 7168), (4096, 2048))
    for m in (1, 8, 32, 64, 128, 256, 512, 1024)
)
#: Its graphs can't be captured on every version of torch.
EAGER_ONLY = frozenset({"async_tp"})
OPERATORS: tuple[OperatorName, ...] = ("gemm", "gemm_all_reduce", "gemm_reduce_scatter")
_SM_RESERVE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """x [M, K] and weights [N, K] of one rank; together the weights are larger than any cache."""

    x: Tensor
    weights: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """`calls[i]` computes with weight i and returns the result."""

    name: str
    calls: tuple[Callable[[], Tensor], ...]
    variant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to launch this project's kernel."""

    config: KernelConfig
    schedule: TileSchedule

    @property
    def text(self) -> str:
        """For the results' rows."""
        one = self.schedule
        lag = f" lag{one.lag} pace{one.pace_ns}" if one.lag or one.pace_ns else ""
        return f"{self.config.name} grid{self.schedule.grid}{lag}"


def num_sms() -> int:
    """Of the current device."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def max_grid() -> int:
    """Blocks of a cooperative launch."""
    return num_sms() - _SM_RESERVE


def size_of(op: OperatorName, shape: Shape, world: int) -> LaunchSize:
    """The launch of one rank."""
    return LaunchSize(m=shape.m, n=shape.n, k=shape.k, world=1 if op == "gemm" else world)


def default_variant(config: KernelConfig, size: LaunchSize, grid: int) -> Variant:
    """The runtime's own choice."""
    chosen = choose_tile(config, size, grid)
    return Variant(config=chosen, schedule=choose_schedule(chosen, size, grid))


def ours(name: str, variant: Variant, rotation: Rotation, arena: Arena | None) -> Contender:
    """This project's kernel, prepared for every weight."""
    config = variant.config
    (m, _), n = rotation.x.shape, rotation.weights[0].shape[0]
    rows = m // arena.world if arena is not None and config.operator == "gemm_reduce_scatter" else m
    outs: tuple[int, ...] = ()
    if config.broadcast == "direct":
        out, outs = symmetric_matrix(rows, n, rotation.x.dtype)
    else:
        out = rotation.x.new_empty(rows, n)
    kernel = load_kernel(compile_kernel(config), torch.cuda.current_device())
    peers = arena.peers(outs) if arena is not None and config.reduces else None

    def call_of(weight: Tensor) -> Callable[[], Tensor]:
        terms = ((Matrix.of(rotation.x), Matrix.of(weight)),)
        arguments = LaunchArguments(terms=terms, out=Matrix.of(out), schedule=variant.schedule, peers=peers)
        prepared = PreparedLaunch(kernel, arguments)

        def call() -> Tensor:
            prepared.run(torch.cuda.current_stream().cuda_stream)
            return out

        return call

    return Contender(name=name, calls=tuple(map(call_of, rotation.weights)), variant=variant.text)


def _rotated(name: str, rotation: Rotation, call: Callable[[Tensor], Tensor]) -> Contender:
    return Contender(name=name, calls=tuple(lambda w=w: call(w) for w in rotation.weights))  # type: ignore[misc]


def cublas(rotation: Rotation) -> Contender:
    """The GEMM alone."""
    out = rotation.x.new_empty(rotation.x.shape[0], rotation.weights[0].shape[0])
    return _rotated("cublas", rotation, lambda w: torch.mm(rotation.x, w.t(), out=out))


def _all_reduce(rotation: Rotation, arena: Arena) -> Iterator[Contender]:
    group = arena.group.group_name
    x, (m, n) = rotation.x, (rotation.x.shape[0], rotation.weights[0].shape[0])
    product = x.new_empty(m, n)
    symmetric, _ = symmetric_matrix(m, n, x.dtype)

    def nccl(w: Tensor) -> Tensor:
        torch.mm(x, w.t(), out=product)
        dist.all_reduce(product)
        return product

    def two_shot(w: Tensor) -> Tensor:
        torch.mm(x, w.t(), out=symmetric)
        result: Tensor = torch.ops.symm_mem.two_shot_all_reduce_(symmetric, "sum", group)
        return result

    def one_shot(w: Tensor) -> Tensor:
        torch.mm(x, w.t(), out=symmetric)
        result: Tensor = torch.ops.symm_mem.one_shot_all_reduce(symmetric, "sum", group)
        return result

    yield _rotated("cublas_nccl", rotation, nccl)
    yield _rotated("cublas_two_shot", rotation, two_shot)
    yield _rotated("cublas_one_shot", rotation, one_shot)


def _reduce_scatter(rotation: Rotation, arena: Arena) -> Iterator[Contender]:
    x, (m, n) = rotation.x, (rotation.x.shape[0], rotation.weights[0].shape[0])
    product, out = x.new_empty(m, n), x.new_empty(m // arena.world, n)

    def nccl(w: Tensor) -> Tensor:
        torch.mm(x, w.t(), out=product)
        dist.reduce_scatter_tensor(out, product)
        return out

    def async_tp(w: Tensor) -> Tensor:
        result: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w.t(), "sum", 0, arena.group.group_name)
        return result

    yield _rotated("cublas_nccl", rotation, nccl)
    yield _rotated("async_tp", rotation, async_tp)


def others(op: OperatorName, rotation: Rotation, arena: Arena | None) -> list[Contender]:
    """Everyone but this project; cuBLAS's GEMM first, for the floor."""
    base = [cublas(rotation)]
    if arena is None:
        return base
    if op == "gemm_all_reduce":
        return [*base, *_all_reduce(rotation, arena)]
    return [*base, *_reduce_scatter(rotation, arena)] if op == "gemm_reduce_scatter" else base


def default_configs(op: OperatorName) -> Sequence[tuple[str, KernelConfig]]:
    """The kernels of an operator, by the contender's name."""
    if op == "gemm_all_reduce":
        return [(f"mkcompile_{how}", KernelConfig(operator=op, broadcast=how)) for how in ("direct", "staged")]  # type: ignore[arg-type]
    return [("mkcompile", KernelConfig(operator=op))]
