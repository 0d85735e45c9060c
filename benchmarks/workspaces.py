"""Symmetric memory for the benchmark's own launches: torch's allocator, the kernels' layout."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from mkcompile.runtime.fault_word import FaultWord
from mkcompile.runtime.kernel import PeerTable
from mkcompile.runtime.workspace_layout import WorkspaceLayout

_LANDING_BYTES = 128 << 20


class Arena:
    """One rank's workspace and the addresses of the others'.

    Units: `total_bytes` bytes; `timeout_s` seconds.
    """

    def __init__(self, total_bytes: int, timeout_s: float = 10.0) -> None:
        self.group = dist.group.WORLD
        assert self.group is not None
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.layout = WorkspaceLayout(world=self.world, total_bytes=total_bytes)
        self._timeout_s = timeout_s
        self._memory = symm_mem.empty(total_bytes, dtype=torch.uint8, device=f"cuda:{self.rank}")
        self._addresses = tuple(symm_mem.rendezvous(self._memory, self.group.group_name).buffer_ptrs)
        self._memory[: self.layout.region_offset] = 0
        self.fault = FaultWord.allocate(self.rank)
        self._landing, _ = symmetric_matrix(1, _LANDING_BYTES // 2, torch.bfloat16)
        self._loads = torch.ones_like(self._landing)
        torch.cuda.synchronize()
        dist.barrier()

    def copies(self, num_bytes: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of target, in the next rank's memory, and source, for copy engines to move so many bytes."""
        assert self.group is not None
        peer = symm_mem.rendezvous(self._landing, self.group.group_name).get_buffer(
            (self.rank + 1) % self.world, self._landing.shape, self._landing.dtype
        )
        whole, rest = divmod(int(num_bytes) // 2, self._landing.numel())
        return [(peer[:, :size], self._loads[:, :size]) for size in [self._landing.numel()] * whole + [rest] if size]

    def peers(self, outs: tuple[int, ...] = ()) -> PeerTable:
        """The table for a launch; `outs` are every rank's results for a direct broadcast."""
        return PeerTable(
            rank=self.rank, workspaces=self._addresses, layout=self.layout, fault_address=self.fault.address,
            timeout_s=self._timeout_s, outs=outs,
        )  # fmt: skip


def symmetric_matrix(rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, tuple[int, ...]]:
    """A matrix in symmetric memory, and its address on every rank."""
    group = dist.group.WORLD
    assert group is not None
    matrix = symm_mem.empty(rows, columns, dtype=dtype, device=f"cuda:{dist.get_rank()}")
    return matrix, tuple(symm_mem.rendezvous(matrix, group.group_name).buffer_ptrs)
