"""All-gather by the copy engine: its transfers, with a flag behind each, and the kernels of one thread around them.

All of a launch is on two streams: the caller's, and one of ours that begins where the caller's stands when the launch
begins, and that the caller's waits for at the end. So it can be captured, and the shard outlives its transfers.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any

from mkcompile.runtime import abi, driver, gather_abi, nvrtc
from mkcompile.runtime.chain import StreamOperations
from mkcompile.runtime.gather_abi import COLUMNS
from mkcompile.runtime.gather_launch import ELEMENT_BYTES, GatherSchedule, GatherSize, slice_blocks
from mkcompile.runtime.kernel import ARCHITECTURE
from mkcompile.runtime.kernel_cache import compiled
from mkcompile.runtime.kernel_config import BLOCK_K
from mkcompile.runtime.side_stream import SideStream, SideStreams
from mkcompile.runtime.workspace_layout import FLAG_BYTES, WorkspaceLayout

# So few registers that a block fits beside those of a library's GEMM, which take all but 1024 of an SM.
_OPTIONS = (f"--gpu-architecture={ARCHITECTURE}", "-std=c++20", "--ptxas-options=-v", "--no-cache", "--maxrregcount=32")
_ENTRY_POINTS = ("gate", "open", "arrivals", "audit")


def engine_source() -> str:
    """The translation unit of these kernels."""
    parameters = "const __grid_constant__ mk::LaunchArguments args, const __grid_constant__ mk::GatherArguments gather"
    return (
        "namespace mk { inline constexpr bool kTrace = false; }\n"
        '#include "device/gather_engine.cuh"\n'
        f'extern "C" __global__ void mk_gate({parameters}) {{ mk::gate_role(args, gather); }}\n'
        f'extern "C" __global__ void mk_open({parameters}) {{ mk::open_role(args); }}\n'
        f'extern "C" __global__ void mk_arrivals({parameters}, unsigned source, unsigned group, unsigned last) {{\n'
        "  mk::engine_arrivals_role(args, gather, source, group, last);\n}\n"
        f'extern "C" __global__ void mk_audit({parameters}) {{ mk::audit_role(args); }}\n'
    )


@cache
def engine_cubin() -> nvrtc.Cubin:
    """Their machine code, from this process, from disk, or from the compiler.

    Raises: CompileError; UnsupportedDeviceError where NVRTC is not installed.
    """
    return compiled("gather_engine", engine_source() + abi.assertions() + gather_abi.assertions(), _OPTIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDevice:
    """One device: the kernels, and the streams of the transfers."""

    gate: ctypes.c_void_p
    open: ctypes.c_void_p
    arrivals: ctypes.c_void_p
    audit: ctypes.c_void_p
    sides: SideStreams

    @staticmethod
    def on(device_idx: int, streams: StreamOperations) -> EngineDevice:
        """Not while a graph is captured. Raises: DriverError, CompileError."""
        image = engine_cubin().image
        functions = {name: driver.load_function(image, f"mk_{name}", 0, device_idx) for name in _ENTRY_POINTS}
        return EngineDevice(sides=SideStreams.on(device_idx, streams), **functions)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One copy: `rows` pieces of `num_bytes`, each `pitch` behind the one before. Units: addresses, bytes."""

    target: int
    source: int
    num_bytes: int
    rows: int = 1
    pitch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlaces:
    """Where one rank's transfers go: every rank's workspace, and the area where shards come to it."""

    rank: int
    layout: WorkspaceLayout
    workspaces: tuple[int, ...]
    areas: tuple[int, ...]

    def flag(self, at: int, source: int, group: int) -> int:
        """Address of a `shard_ready` flag. Source: Staging::flag in csrc/device/comm.cuh."""
        index = source * self.layout.max_tiles + group  # of kPartialReady, the first kind
        return self.workspaces[at] + abi.WORKSPACE_HEADER_BYTES + index * FLAG_BYTES

    def slot(self, at: int, source: int) -> int:
        """Which part of rank `at`'s area is rank `source`'s."""
        return (source - at - 1) % self.layout.world


def transfers(shard: int, size: GatherSize, schedule: GatherSchedule, places: EnginePlaces) -> list[Transfer]:
    """Each chunk and its flag, to the ranks in the order in which they need it."""
    rank, world = places.rank, size.world
    group_bytes = schedule.group_rows * size.k * ELEMENT_BYTES
    groups = ceil(size.shard_rows / schedule.group_rows)
    turns = [(step, part) for step in range(1, world) for part in range(groups * schedule.slices)]
    if schedule.order == COLUMNS:
        turns.sort(key=lambda turn: (turn[1], turn[0]))
    row_bytes, slice_bytes = size.k * ELEMENT_BYTES, slice_blocks(size.k, schedule.slices) * BLOCK_K * ELEMENT_BYTES
    copies = []
    for step, part in turns:
        group, number = divmod(part, schedule.slices)
        peer, start, left = (rank - step) % world, group * group_bytes, number * slice_bytes
        target = places.areas[peer] + places.slot(peer, rank) * size.shard_bytes + start + left
        moved_bytes = min(group_bytes, size.shard_bytes - start)
        if schedule.slices == 1:
            copies.append(Transfer(target, shard + start, moved_bytes))
        else:
            width = min(slice_bytes, row_bytes - left)
            copies.append(Transfer(target, shard + start + left, width, moved_bytes // row_bytes, row_bytes))
        # The flag is the stream's next transfer: see "Flags of the copy engine" in docs/memory_ordering.md.
        # pairs-with: shard_ready release (copy_engine -> engine_arrivals_role), scope sys
        copies.append(Transfer(places.flag(peer, rank, part), places.flag(rank, rank, 0), FLAG_BYTES))
    return copies


class _RowsCopy(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        *(
            (f"{side}_{name}", kind)
            for side in ("source", "target")
            for name, kind in (
                ("x", ctypes.c_size_t), ("y", ctypes.c_size_t), ("memory_type", ctypes.c_int),
                ("host", ctypes.c_void_p), ("address", ctypes.c_uint64), ("array", ctypes.c_void_p),
                ("pitch", ctypes.c_size_t),
            )
        ),
        ("width", ctypes.c_size_t), ("height", ctypes.c_size_t),
    )  # fmt: skip


_DEVICE_MEMORY = 2  # CU_MEMORYTYPE_DEVICE


def _call_of(one: Transfer) -> tuple[str, tuple[Any, ...]]:
    """The driver's function, and its operands without the stream."""
    if one.rows == 1:
        operands = ctypes.c_uint64(one.target), ctypes.c_uint64(one.source), ctypes.c_size_t(one.num_bytes)
        return "cuMemcpyAsync", operands
    rows = _RowsCopy(
        source_memory_type=_DEVICE_MEMORY, source_address=one.source, source_pitch=one.pitch,
        target_memory_type=_DEVICE_MEMORY, target_address=one.target, target_pitch=one.pitch,
        width=one.num_bytes, height=one.rows,
    )  # fmt: skip
    return "cuMemcpy2DAsync_v2", (ctypes.byref(rows),)


class PreparedTransfers:
    """The transfers of one launch, whose arguments its kernels share. Keeps no reference to memory."""

    def __init__(
        self, device: EngineDevice, arguments: tuple[abi.KernelArguments, gather_abi.GatherArguments],
        copies: list[Transfer],
    ) -> None:  # fmt: skip
        self._device, self._arguments = device, arguments
        self._copies = [_call_of(one) for one in copies]
        self._config = driver.LaunchConfig(grid=(1, 1, 1), block=(1, 1, 1), shared_bytes=0, num_attributes=0)
        self._words = (ctypes.c_uint32 * 3)()
        self._opened = False
        self._side: SideStream | None = None
        addresses = [ctypes.addressof(block) for block in arguments]
        addresses += [ctypes.addressof(self._words) + 4 * i for i in range(3)]
        self._parameters = (ctypes.c_void_p * 5)(*addresses)

    def _launch(self, function: ctypes.c_void_p, stream: int) -> None:
        self._config.stream = stream
        code = driver.library().cuLaunchKernelEx(ctypes.byref(self._config), function, self._parameters, None)
        if code:
            driver.check("cuLaunchKernelEx(gather_engine)", code)

    def open(self, stream: int, captured: bool) -> None:
        """Enter the launch, where no fused kernel does; `captured`: into a graph."""
        self._arguments[0].is_captured = captured
        self._opened = True
        self._launch(self._device.open, stream)

    def start(self, stream: int) -> None:
        """Enqueue gate and transfers, beside what `stream` is given next. Raises: DriverError."""
        sides, library = self._device.sides, driver.library()
        self._side = side = sides.part(stream)
        self._launch(self._device.gate, side.handle)
        handle = ctypes.c_void_p(side.handle)
        for name, operands in self._copies:
            code = getattr(library, name)(*operands, handle)
            if code:
                driver.check(f"{name} (gather_engine)", code)
        sides.end(side)

    def await_rows(self, stream: int, source: int, group: int, last: bool) -> None:
        """What follows on the stream finds the groups up to `group` of a rank; at last the launch is left."""
        self._words[0], self._words[1], self._words[2] = source, group, int(last)
        self._launch(self._device.arrivals, stream)

    def finish(self, stream: int) -> None:
        """After the last product. What follows on the stream may write the shard."""
        if self._opened:  # a fused kernel looks by itself
            self._launch(self._device.audit, stream)
        assert self._side is not None, "not started"
        self._device.sides.join(self._side, stream)
