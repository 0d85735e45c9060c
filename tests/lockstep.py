"""Runs one function as several ranks in one process: a thread a rank, collectives that meet at a barrier.

No process group, no sockets, and sums in rank order: what a rewritten graph computes can be compared bit for bit with
what the original does. Functional collectives (`torch.ops._c10d_functional.*`) and fused operators
(`torch.ops.mkcompile.*`, by their reference) are understood.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2_dense
from torch.utils._python_dispatch import TorchDispatchMode

from mkcompile.ops.registry import call_types

DEADLINE_S = 60.0


@dataclass(slots=True)
class World:
    """`groups` gives for each group name the ranks of every group of that name (default: all ranks, any name)."""

    world_size: int
    groups: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    _barrier: threading.Barrier = field(init=False)
    _slots: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self._barrier = threading.Barrier(self.world_size, timeout=DEADLINE_S)
        self._slots = [None] * self.world_size

    def exchange(self, rank: int, group: str, what: str, value: Any) -> list[Any]:
        """The values of all members of this rank's group, in rank order.

        Raises: AssertionError where the ranks do not all come to the same collective.
        """
        self._slots[rank] = (what, value)
        self._barrier.wait()
        members = self.members(rank, group)
        seen = [self._slots[member] for member in members]
        self._barrier.wait()
        assert len({one for one, _ in seen}) == 1, f"ranks {members} came to {[one for one, _ in seen]}"
        return [one for _, one in seen]

    def members(self, rank: int, group: str) -> Sequence[int]:
        """The ranks of this rank's group."""
        return next((one for one in self.groups.get(group, ()) if rank in one), range(self.world_size))

    def abort(self) -> None:
        """Wake up the ranks that wait for one that failed."""
        self._barrier.abort()


def run(world: World, function: Callable[..., Any], inputs_of: Callable[[int], Sequence[Any]]) -> list[Any]:
    """`function(*inputs_of(rank))` on every rank; the results in rank order. The first failure is raised."""

    def one_rank(rank: int) -> Any:
        try:
            with torch.no_grad(), _Rank(world, rank):
                return function(*inputs_of(rank))
        except BaseException:
            world.abort()
            raise

    with ThreadPoolExecutor(world.world_size) as pool:
        futures = [pool.submit(one_rank, rank) for rank in range(world.world_size)]
        failures = [future.exception() for future in futures]
    telling = [one for one in failures if one is not None and not isinstance(one, threading.BrokenBarrierError)]
    for failure in (*telling, *failures):
        if failure is not None:
            raise failure
    return [future.result() for future in futures]


class _Rank(TorchDispatchMode):
    """Answers collectives and fused operators for one rank."""

    supports_higher_order_operators = True

    def __init__(self, world: World, rank: int) -> None:
        super().__init__()
        self._world = world
        self._rank = rank

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.higher_order.auto_functionalized_v2:
            with self:
                return auto_functionalized_v2_dense(*args, **(kwargs or {}))
        if func.namespace == "mkcompile":
            call = call_types()[func._opname](*args)
            call.check()
            with self:
                result = call.reference()
            return result if func._schema.returns else None
        if func.namespace == "_c10d_functional":
            return getattr(self, "_" + func._opname)(*args)
        return func(*args, **(kwargs or {}))

    def _exchange(self, what: str, group: str, value: Any) -> list[Any]:
        return self._world.exchange(self._rank, group, what, value)

    def _wait_tensor(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def _all_reduce(self, x: torch.Tensor, op: str, group: str) -> torch.Tensor:
        summed = _reduce(self._exchange(f"all_reduce {op} {group} {tuple(x.shape)} {x.dtype}", group, x), op)
        return summed.contiguous()  # as the collective, whose result lies in order

    def _all_gather_into_tensor(self, x: torch.Tensor, world_size: int, group: str) -> torch.Tensor:
        shards = self._exchange(f"all_gather {group} {tuple(x.shape)} {x.dtype}", group, x)
        assert len(shards) == world_size
        return torch.cat(shards)

    def _reduce_scatter_tensor(self, x: torch.Tensor, op: str, world_size: int, group: str) -> torch.Tensor:
        whole = _reduce(self._exchange(f"reduce_scatter {op} {group} {tuple(x.shape)} {x.dtype}", group, x), op)
        place = list(self._world.members(self._rank, group)).index(self._rank)
        return whole.chunk(world_size)[place].clone()

    def _all_to_all_single(self, x: torch.Tensor, out_sizes: Any, in_sizes: Any, group: str) -> torch.Tensor:
        pieces = self._exchange(f"all_to_all {group}", group, x.split(list(in_sizes)))
        place = list(self._world.members(self._rank, group)).index(self._rank)
        return torch.cat([piece[place] for piece in pieces])


def _reduce(values: list[torch.Tensor], op: str) -> torch.Tensor:
    """In rank order, in the values' dtype."""
    total = values[0].clone()
    for value in values[1:]:
        total = torch.maximum(total, value) if op == "max" else total * value if op == "product" else total + value
    return total / len(values) if op == "avg" else total
