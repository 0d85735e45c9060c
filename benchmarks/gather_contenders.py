"""Who is compared at all-gather + GEMM: NCCL + cuBLAS, torch's asynchronous tensor parallelism, our variants.

Legend: M gathered rows, N columns, K summed; W ranks. Every call ends with [M, N] in memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mkcompile.runtime.gather_engine import EngineDevice, EnginePlaces
from mkcompile.runtime.gather_form import GatherForm
from mkcompile.runtime.gather_launch import GatherSize
from mkcompile.runtime.gather_operation import EngineSide, GatherSite, GatherTensors
from mkcompile.runtime.gather_schedule import GatherChoice, Variant, choose_gather
from mkcompile.runtime.kernel import compile_kernel, load_kernel
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.streams import DriverStreams

from .workspaces import Arena, symmetric_matrix

_SM_RESERVE = 4
VARIANTS: tuple[Variant, ...] = ("push", "pull", "copy_engine", "library")


@dataclass(slots=True)
class Gatherer:
    """One rank's side of the copy engine: its streams, its area, and where all areas are."""

    arena: Arena
    side: EngineSide

    @staticmethod
    def of(arena: Arena, area_bytes: int) -> Gatherer:
        """Collective. Units: `area_bytes` of what all peers send to one rank."""
        memory, addresses = symmetric_matrix(1, area_bytes // 2, torch.bfloat16)
        peers = arena.peers()
        places = EnginePlaces(rank=arena.rank, layout=arena.layout, workspaces=peers.workspaces, areas=addresses)
        device = EngineDevice.on(torch.cuda.current_device(), DriverStreams())
        return Gatherer(arena, EngineSide(device=device, places=places, memory=memory.view(torch.uint8).view(-1)))

    def prepare(
        self, choice: GatherChoice, size: GatherSize, shard: Tensor, w: Tensor, out: Tensor
    ) -> Callable[[], Tensor]:
        """One call of a variant, on the stream that is current when it is called."""
        kernel = None
        if choice.variant != "library":
            kernel = load_kernel(compile_kernel(choice.config), torch.cuda.current_device())
        site = GatherSite(
            form=GatherForm(config=choice.config, size=size, gathered_shape=()), choice=choice, kernel=kernel,
            peers=self.arena.peers(), engine=self.side if choice.schedule.by_engine else None,
        )  # fmt: skip
        tensors = GatherTensors(shard=shard, w=[w.t()], weights=[w], bias=[None], outs=[out], gathered=None)
        prepared = site.prepare(tensors)

        def call() -> Tensor:
            stream = torch.cuda.current_stream().cuda_stream
            prepared.run(tensors, stream, torch.cuda.is_current_stream_capturing())
            return out

        return call


def chosen(size: GatherSize, variant: Variant | None) -> GatherChoice:
    """The runtime's choice, of all variants or of one."""
    sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return choose_gather(KernelConfig(operator="all_gather_gemm"), size, sms - _SM_RESERVE, variant=variant)


def text_of(choice: GatherChoice) -> str:
    """For the results' rows."""
    schedule, config = choice.schedule, choice.config
    if choice.variant == "library":
        return f"library {schedule.group_rows} rows"
    tile = f"{config.block_m}x{config.block_n}"
    if choice.variant == "stream":
        return f"stream {tile}/{config.split} grid{schedule.grid}"
    tile += f"/{config.split}" if config.split > 1 else ""
    slices = f" s{schedule.slices}" if schedule.slices > 1 else ""
    pace = f" pace{schedule.pace_ns} f{schedule.fenced}" if schedule.pace_ns else ""
    moved = f"{schedule.group_rows} rows{slices}" if schedule.by_engine else f"band{schedule.band}{pace}"
    return f"{choice.variant} {tile} grid{schedule.grid} {moved}"


def others(
    shard: Tensor, w: Tensor, group: str, gathered: Tensor, out: Tensor
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """The contenders that are not ours, by name; `gathered` and `out` are theirs to write."""

    def nccl() -> Tensor:
        dist.all_gather_into_tensor(gathered, shard)
        torch.mm(gathered, w.t(), out=out)
        return out

    def async_tp() -> Tensor:
        _, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(shard, [w.t()], 0, group)
        result: Tensor = product
        return result

    yield "cublas_nccl", nccl
    yield "async_tp", async_tp


def ours(shard: Tensor, w: Tensor, gatherer: Gatherer) -> Iterator[tuple[str, Callable[[], Tensor], str]]:
    """Name, call and description: the runtime's choice, then each variant by itself."""
    world = dist.get_world_size()
    size = GatherSize(segment_rows=shard.shape[0], k=shard.shape[1], n=(w.shape[0],), world=world)
    for variant in (None, *VARIANTS):
        choice = chosen(size, variant)
        out = shard.new_empty(size.rows, w.shape[0])
        name = "mkcompile" if variant is None else f"mkcompile_{variant}"
        yield name, gatherer.prepare(choice, size, shard, w, out), text_of(choice)
