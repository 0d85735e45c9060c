"""What waits for what between blocks and ranks, small enough to be walked for many sizes.

A block is a store thread, which takes its positions in rising order, and a copy thread, which takes its share of the
finished tiles. Every wait is for a flag that, once raised, stays raised, and raising flags is all that a step does. So
whether all can finish does not depend on who runs first: running whoever can until nobody can decides it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .device_schedule import Task

Flag = tuple[str, int, int, int]  # kind, at rank, from rank, tile


@dataclass(slots=True)
class Thread:
    """Steps still to be made: the flags each needs, and the flags it raises."""

    steps: list[tuple[list[Flag], list[Flag]]] = field(default_factory=list)
    done: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The protocol, with switches for the errors that the tests plant."""

    slots: int
    broadcasts: bool = False
    staged: bool = False
    frees_partials: bool = True
    descending: bool = False


def store_steps(order: Sequence[Task], block: int, grid: int, rank: int, world: int, rules: Rules) -> Thread:
    """The store thread of one block (both of them: they do the same), with the signals that follow each tile."""
    peers = [peer for peer in range(world) if peer != rank]
    thread = Thread()
    mine = [task for task in order[block::grid] if task.valid]
    for task in reversed(mine) if rules.descending else mine:
        if task.owner != rank:
            needs = [("partial_free", rank, task.owner, task.index - rules.slots)] if task.index >= rules.slots else []
            thread.steps.append((needs, [("partial_ready", task.owner, rank, task.index)]))
            continue
        needs = [("partial_ready", rank, peer, task.index) for peer in peers]
        if rules.staged and task.index >= rules.slots:
            needs += [("final_free", rank, peer, task.index - rules.slots) for peer in peers]
        raises: list[Flag] = []
        if rules.frees_partials:
            raises += [("partial_free", peer, rank, task.index) for peer in peers]
        if rules.broadcasts:
            raises += [("final_ready", peer, rank, task.index) for peer in peers]
        thread.steps.append((needs, raises))
    return thread


def copy_steps(counts: Sequence[int], block: int, grid: int, rank: int, world: int) -> Thread:
    """The copy thread of one block, as ArrivalQueue walks."""
    thread = Thread()
    for at in range(block, max(counts) * (world - 1), grid):
        index, owner = at // (world - 1), (rank + 1 + at % (world - 1)) % world
        if index < counts[owner]:
            thread.steps.append(([("final_ready", rank, owner, index)], [("final_free", owner, rank, index)]))
    return thread


def stuck_threads(orders: Sequence[Sequence[Task]], grids: Sequence[int], rules: Rules) -> int:
    """Threads that can never finish; 0 is progress."""
    world = len(orders)
    counts = [sum(task.valid and task.owner == rank for task in orders[rank]) for rank in range(world)]
    threads = []
    for rank in range(world):
        for block in range(grids[rank]):
            threads.append(store_steps(orders[rank], block, grids[rank], rank, world, rules))
            if rules.broadcasts:
                threads.append(copy_steps(counts, block, grids[rank], rank, world))
    raised: set[Flag] = set()
    moved = True
    while moved:
        moved = False
        for thread in threads:
            while thread.done < len(thread.steps) and all(flag in raised for flag in thread.steps[thread.done][0]):
                raised.update(thread.steps[thread.done][1])
                thread.done += 1
                moved = True
    return sum(thread.done < len(thread.steps) for thread in threads)
