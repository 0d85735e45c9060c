"""Reductions that are added to a residual in place: by the kernel, tile by tile, where it can, else behind it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from mkcompile.ops.gemm_all_reduce import GemmAllReduceAdd
from mkcompile.ops.gemm_reduce_scatter import GemmReduceScatterAdd
from mkcompile.ops.groups import find
from mkcompile.runtime.form import ALIGNED_BYTES
from mkcompile.runtime.operation import GROUP, Group, Operation

ReductionAdd = GemmReduceScatterAdd | GemmAllReduceAdd


@dataclass(slots=True, kw_only=True)
class Adding:
    """All calls of one signature. `plain` makes the sum, and `native`, where the kernel can, adds it, too: the same
    kernel on the same workspace, so what a rank does with its own residual is no matter of its peers.
    """

    plain: Operation
    native: Operation | None

    @staticmethod
    def like(plain: Operation) -> Adding:
        """Native for the kernels of many rows, within a node, whose result no peer stores into."""
        return Adding(plain=plain, native=plain.adding() if plain.kernel.config.can_add else None)

    @property
    def group(self) -> Group:
        """Whose ranks launch together."""
        return self.plain.group

    @property
    def process_group(self) -> Callable[[], ProcessGroup | None]:
        """As of an operation."""
        return self.plain.process_group

    def run(self, residual: Tensor, x: Sequence[Tensor], w: Sequence[Tensor], bias: Tensor | None) -> Tensor | None:
        """On the current stream; returns the residual, or None where there is no room and the residual is as it was.

        Raises: as an operation, before anything is added.
        """
        if self.native is not None and residual.data_ptr() % ALIGNED_BYTES == 0:
            return self.native.run(x, w, bias, residual)
        addend = self.plain.run(x, w, bias)
        return None if addend is None else residual.add_(addend)

    def again(
        self, residual: Tensor, x: Sequence[Tensor], w: Sequence[Tensor], bias: Tensor | None, *options: Any
    ) -> Tensor | None:
        """A call like the first, its options included; None where the group's name is another group's now.

        Raises: as `run`, and what an earlier launch has reported.
        """
        try:
            if self.plain.process_group() is not find(options[GROUP]):
                return None
        except (RuntimeError, KeyError, ValueError):  # no group has the name: what the long way says of it
            return None
        self.plain.group.workspace.board.check()
        return self.run(residual, x, w, bias)


def layout_of(residual: Tensor) -> Hashable:
    """All but the address of what a decision about the residual depends on."""
    return residual.shape, residual.stride(), residual.dtype, residual.get_device()
