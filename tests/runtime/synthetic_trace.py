"""Timelines that no GPU wrote: two ranks with known clocks, a launch of few tiles, made by arithmetic."""

from __future__ import annotations

import ctypes

import numpy as np

from mkcompile.runtime import abi
from mkcompile.runtime.recorder import TASK, RankTrace, Tasks
from mkcompile.runtime.trace.instances import LANE, ROLE

LAUNCH = "gemm_reduce_scatter 1024x1024x512 on 2 ranks, 128x256_s3_bfloat16_nk, grid 4"
TILE_NS, EPILOGUE_NS, FLIGHT_NS, FENCE_NS = 10_000, 2_000, 1_500, 700
NUM_BLOCKS, TILES = 4, 4


def rank_trace(rank: int, ahead_ns: int, epochs: int = 2, late_ns: int = 0) -> RankTrace:
    """Rank `rank`, whose clock is `ahead_ns` ahead of true time and who begins `late_ns` late."""
    rows: list[tuple[int, ...]] = []
    for epoch in range(1, epochs + 1):
        begin_ns = 1_000_000 + epoch * 100_000 + late_ns
        for block in range(NUM_BLOCKS):
            rows += _block(rank, block, epoch, begin_ns + 10 * block, ahead_ns)
    tasks = np.array(rows, dtype=TASK)
    return RankTrace(rank=rank, device="synthetic", launches=(LAUNCH,), groups=((0, 1),), tasks=tasks)


def _block(rank: int, block: int, epoch: int, begin_ns: int, ahead_ns: int) -> list[tuple[int, ...]]:
    """Tiles alternate between the peer and this rank; what an own tile waits for was sent a tile earlier."""
    rows: list[tuple[int, ...]] = []

    def task(role: str, lane: str, at: tuple[int, int], waited_ns: int = 0, tile: int = 0, owner: int = rank) -> None:
        start, end = at
        fields = (start + ahead_ns, end + ahead_ns, waited_ns, tile, 0, ROLE[role], owner, block, LANE[lane])
        rows.append(fields)

    now = begin_ns + 1_000
    for number in range(TILES):
        tile, owner = block + NUM_BLOCKS * (number // 2), rank if number % 2 else 1 - rank
        done, stored = now + TILE_NS, now + TILE_NS + EPILOGUE_NS
        task("load", "load", (now - 500, done - 1_000), 300, tile, owner)
        for group in range(2):
            task("mainloop", f"compute {group}", (now, done), 500, tile, owner)
            task("epilogue", f"compute {group}", (done, stored), 100, tile, owner)
            waited = FLIGHT_NS + FENCE_NS if owner == rank else 50
            task("receive", f"store {group}", (done, done + waited), waited, tile, owner)
            task("store" if owner == rank else "push", f"store {group}", (stored, stored + 1_000), 0, tile, owner)
        if owner != rank:
            task("signal", "signal", (stored + 1_000, stored + 1_100 + FENCE_NS), FENCE_NS, tile, owner)
        now = stored
    task("block", "compute 0", (begin_ns, now + 3_000), 0, epoch)
    return rows


def ring_bytes(tasks: Tasks, num_blocks: int, records: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The tasks as kernels would leave them in memory, the oldest overwritten where a ring is full."""
    lanes, slot_bytes = len(abi.TRACE_LANES), ctypes.sizeof(abi.TraceRecord)
    memory = np.zeros((num_blocks, lanes, records + 1, slot_bytes), dtype=np.uint8)
    for row in tasks:
        ring = memory[row["block"], row["lane"]]
        header = abi.TraceLaneHeader.from_buffer(ring[0])
        record = abi.TraceRecord.from_buffer(ring[1 + header.written % records])
        for name in ("start_ns", "end_ns", "waited_ns", "tile", "launch", "role", "owner"):
            setattr(record, name, int(row[name]))
        header.written += 1
    return memory.reshape(-1)
