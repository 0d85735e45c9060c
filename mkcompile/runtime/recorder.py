"""The rings of one device, and what its launches were: what `Launcher` holds while it traces."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mkcompile.runtime import abi

#: Records kept for each thread with a role: the newest.
DEFAULT_RECORDS = 512
_NUM_LANES = len(abi.TRACE_LANES)
_SLOT_BYTES = ctypes.sizeof(abi.TraceRecord)
_WRITTEN_OFFSET = abi.TraceLaneHeader.written.offset

#: A ring's record with the block and lane that wrote it.
TASK = np.dtype(
    [
        ("start_ns", "<u8"), ("end_ns", "<u8"), ("waited_ns", "<u4"), ("tile", "<u4"), ("launch", "<u4"),
        ("role", "u1"), ("owner", "u1"), ("block", "<u2"), ("lane", "u1"),
    ]
)  # fmt: skip
_DEVICE_RECORD = np.dtype(
    {
        "names": [name for name, *_ in abi.TraceRecord._fields_ if name != "reserved"],
        "formats": ["<u8", "<u8", "<u4", "<u4", "<u4", "u1", "u1"],
        "offsets": [getattr(abi.TraceRecord, name).offset for name, *_ in abi.TraceRecord._fields_][:-1],
        "itemsize": _SLOT_BYTES,
    }
)
Tasks = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """All that one rank recorded. `launches[i]` describes the launches that tasks of `launch` i belong to, and
    `groups[i]` are the ranks that took part. `overwritten`: records that a ring no longer had room for.
    """

    rank: int
    device: str
    launches: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    tasks: Tasks
    overwritten: int = 0


@dataclass(slots=True)
class Recorder:
    """Rings for every block that a device can hold. Units: `records` a thread."""

    device: torch.device
    num_blocks: int
    records: int = DEFAULT_RECORDS
    _memory: torch.Tensor = field(init=False)
    _launches: dict[tuple[str, tuple[int, ...]], int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        size_bytes = self.num_blocks * _NUM_LANES * (self.records + 1) * _SLOT_BYTES
        self._memory = torch.zeros(size_bytes, dtype=torch.uint8, device=self.device)

    def stamp(self, packed: abi.KernelArguments, text: str, group: tuple[int, ...]) -> None:
        """Have the launches of an argument block recorded, under this description."""
        packed.trace = self._memory.data_ptr()
        packed.trace_blocks, packed.trace_records = self.num_blocks, self.records
        packed.trace_launch = self._launches.setdefault((text, group), len(self._launches))

    def clear(self) -> None:
        """Forget what was recorded; behind all work of the current stream."""
        self._memory.zero_()

    def read(self, rank: int) -> RankTrace:
        """What was recorded so far. The device must be idle."""
        slots = self._memory.view(self.num_blocks, _NUM_LANES, self.records + 1, _SLOT_BYTES)
        written = slots[:, :, 0, _WRITTEN_OFFSET : _WRITTEN_OFFSET + 8].contiguous().view(torch.int64)
        used = min(self.records, max(1, int(written.max())))  # the rest, which is most of it, stays where it is
        tasks, overwritten = parse(slots[:, :, : used + 1].contiguous().cpu().numpy(), self.num_blocks, used)
        is_cuda = self.device.type == "cuda"
        return RankTrace(
            rank=rank,
            device=torch.cuda.get_device_name(self.device) if is_cuda else str(self.device),
            launches=tuple(text for text, _ in self._launches),
            groups=tuple(group for _, group in self._launches),
            tasks=tasks,
            overwritten=overwritten,
        )


def parse(memory: NDArray[np.uint8], num_blocks: int, records: int) -> tuple[Tasks, int]:
    """The tasks of all rings, by block and lane in the order of writing, and how many were overwritten.

    Shapes: memory is [num_blocks, lanes, records + 1, bytes of a record].
    """
    slots = memory.reshape(num_blocks, _NUM_LANES, records + 1, _SLOT_BYTES)
    headers = np.ascontiguousarray(slots[:, :, 0, _WRITTEN_OFFSET : _WRITTEN_OFFSET + 8])
    written = headers.view("<u8")[..., 0].astype(np.int64)
    first = np.maximum(written - records, 0)
    block, lane, place = np.nonzero(np.arange(records) < (written - first)[..., None])
    rings = np.ascontiguousarray(slots[:, :, 1:]).view(_DEVICE_RECORD)[..., 0]
    kept = rings[block, lane, (first[block, lane] + place) % records]
    tasks = np.zeros(len(kept), dtype=TASK)
    for name in _DEVICE_RECORD.names or ():
        tasks[name] = kept[name]
    tasks["block"], tasks["lane"] = block, lane
    return tasks, int(first.sum())
