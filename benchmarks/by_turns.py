"""Ranks that share one GPU, which the driver lets run by turns: what takes the place of NCCL, and of a refusal, there.

Functional collectives on CUDA tensors, which gloo has not (its `all_gather_into_tensor` hands addresses of the device
to code for the host, and the process ends), go through one buffer a rank that all ranks have mapped: each rank copies
its part into its own buffer, all meet, each takes what it needs from all of them, all meet again. In a CUDA graph they
meet on the device, by flags that the driver's stream operations write and wait for; else on the host.
"""

from __future__ import annotations

import ctypes
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mkcompile.plan.topology import Topology
from mkcompile.runtime import driver, machine
from mkcompile.runtime.exchange import Exchange
from mkcompile.runtime.platform import CudaPlatform
from mkcompile.runtime.probe import Survey

_BUFFER_BYTES = 128 << 20
_FLAG_BYTES = 4096
_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ

Take = Callable[[int, list[Tensor]], None]


class SharedPlatform(CudaPlatform):
    """Ranks on one GPU: refused outside of trials."""

    def survey(self, exchange: Exchange, device: torch.device) -> Survey:
        """Collective."""
        found = super().survey(exchange, device)
        return replace(found, obstacle="") if "share a GPU" in found.obstacle else found


def plan_as(node: Topology) -> None:
    """As if each rank had a GPU of its own, or the planner would see a node for each rank; and torch shares memory."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    machine._machine = lambda world_size: node  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """One buffer a rank, each as this rank sees it, behind flags; `host_group`: gloo, of all ranks.

    A rank sets flag `phase * W + its own number` in its peers' buffers, and clears those in its own.
    """

    rank: int
    seen: tuple[Tensor, ...]
    host_group: dist.ProcessGroup

    @staticmethod
    def made(device: torch.device, num_bytes: int) -> Buffers:
        """Collective over all ranks. Units: `num_bytes` bytes of a piece."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        host_group = dist.new_group(backend="gloo")
        own = torch.zeros(_FLAG_BYTES + num_bytes, dtype=torch.uint8, device=device)
        handles: list[bytes] = [b""] * world_size
        dist.all_gather_object(handles, bytes(ForkingPickler.dumps(own)), group=host_group)
        seen = tuple(own if i == rank else pickle.loads(one) for i, one in enumerate(handles))
        return Buffers(rank=rank, seen=seen, host_group=host_group)

    def exchange(self, x: Tensor, take: Take) -> None:
        """`take(start, parts)`: elements from `start` of every rank's `x`, flat; collective, in pieces that fit."""
        flat = x.contiguous().view(-1)
        piece = (self.seen[0].numel() - _FLAG_BYTES) // flat.element_size()
        for start in range(0, flat.numel(), piece):
            mine = flat[start : start + piece]
            window = slice(_FLAG_BYTES, _FLAG_BYTES + mine.numel() * mine.element_size())
            parts = [one[window].view(flat.dtype) for one in self.seen]
            parts[self.rank].copy_(mine)
            self._meet(0, x.device)
            take(start, parts)
            self._meet(1, x.device)

    def _meet(self, phase: int, device: torch.device) -> None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._meet_on_device(phase)
            return
        if device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        dist.barrier(group=self.host_group)

    def _meet_on_device(self, phase: int) -> None:
        """Phases alternate: before a peer comes to one again, this rank has cleared its flag and come to the other."""
        world_size, stream = len(self.seen), torch.cuda.current_stream().cuda_stream
        others = [rank for rank in range(world_size) if rank != self.rank]
        for rank in others:
            _stream_value("Write", stream, self.seen[rank], phase * world_size + self.rank, 1)
        for rank in others:
            _stream_value("Wait", stream, self.seen[self.rank], phase * world_size + rank, 1)
            _stream_value("Write", stream, self.seen[self.rank], phase * world_size + rank, 0)

    def gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Every rank's `x`, one behind the other."""
        world_size = len(self.seen)
        result = x.new_empty(world_size * x.shape[0], *x.shape[1:]) if out is None else out
        rows = result.view(world_size, -1)

        def take(start: int, parts: list[Tensor]) -> None:
            for row, part in zip(rows, parts, strict=True):
                row[start : start + part.numel()].copy_(part)

        self.exchange(x, take)
        return result

    def reduce(self, x: Tensor, reduce_op: str) -> Tensor:
        """The sum of every rank's `x` in fp32 and the ranks' order, rounded once."""
        if reduce_op not in ("sum", "avg"):
            raise NotImplementedError(f"ranks on one GPU have no {reduce_op}")
        result = torch.empty(x.shape, dtype=x.dtype, device=x.device)

        def take(start: int, parts: list[Tensor]) -> None:
            total = parts[0].float() if parts[0].element_size() == 2 else parts[0].clone()
            for part in parts[1:]:
                total += part
            result.view(-1)[start : start + total.numel()].copy_(total / len(parts) if reduce_op == "avg" else total)

        self.exchange(x, take)
        return result

    def own_chunk(self, x: Tensor) -> Tensor:
        """This rank's rows."""
        return x.chunk(len(self.seen), 0)[self.rank].contiguous()


def _stream_value(what: str, stream: int, buffer: Tensor, idx: int, value: int) -> None:
    call, address = f"cuStream{what}Value32_v2", ctypes.c_uint64(buffer.data_ptr() + 4 * idx)
    flags = _EQUAL if what == "Wait" else 0
    driver.check(call, getattr(driver.library(), call)(ctypes.c_void_p(stream), address, value, flags))


def install(device: torch.device, num_bytes: int = _BUFFER_BYTES) -> torch.library.Library:
    """Functional collectives on this kind of device go through buffers from now on, as long as the library is kept.

    Collective over all ranks; so are they, whatever group they name.
    """
    buffers = Buffers.made(device, num_bytes)
    library = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]
    for name, function in _collectives(buffers).items():
        library.impl(name, torch.no_grad()(function), device.type.upper())  # type: ignore[no-untyped-call]
    return library


def _collectives(buffers: Buffers) -> dict[str, Callable[..., Any]]:
    def all_reduce(x: Tensor, reduce_op: str, group: str) -> Tensor:
        return buffers.reduce(x, reduce_op)

    def all_reduce_(x: Tensor, reduce_op: str, group: str) -> Tensor:
        return x.copy_(buffers.reduce(x, reduce_op))

    def reduce_scatter(x: Tensor, reduce_op: str, size: int, group: str) -> Tensor:
        return buffers.own_chunk(buffers.reduce(x, reduce_op))

    def all_gather(x: Tensor, size: int, group: str) -> Tensor:
        return buffers.gather(x)

    def all_gather_out(x: Tensor, size: int, group: str, *, out: Tensor) -> Tensor:
        return buffers.gather(x, out)

    return {
        "all_reduce": all_reduce, "all_reduce_": all_reduce_, "reduce_scatter_tensor": reduce_scatter,
        "all_gather_into_tensor": all_gather, "all_gather_into_tensor_out": all_gather_out,
        "all_reduce_coalesced": _each(all_reduce), "all_reduce_coalesced_": _each(all_reduce_),
        "reduce_scatter_tensor_coalesced": _each(reduce_scatter),
        "all_gather_into_tensor_coalesced": _each(all_gather),
    }  # fmt: skip


def _each(one: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    def coalesced(xs: Sequence[Tensor], *arguments: Any) -> list[Tensor]:
        return [one(x, *arguments) for x in xs]

    return coalesced
