"""`csrc/abi/gather_arguments.h` in ctypes: the second argument of the all-gather kernels."""

from __future__ import annotations

import ctypes

from mkcompile.runtime.abi import TENSOR_MAP_BYTES, offset_assertions, padded_size

MAX_WEIGHTS = 4

#: How gathered rows lie and come; the number is the device's `GatherOrder`.
APART, TOGETHER, COLUMNS = range(3)
#: Who moves them; the number is the device's `GatherMover`.
ENGINE_COPIES, BLOCKS_PUSH, PEERS_READ, BLOCKS_PULL = range(4)


class GatherArguments(ctypes.Structure):
    """`mk::GatherArguments`; its header says what each field is."""

    _fields_ = (
        ("arena", ctypes.c_uint64 * 16 * 2),
        ("out", ctypes.c_uint64 * 16 * MAX_WEIGHTS),
        ("gathered", ctypes.c_uint64 * 16),
        ("shard", ctypes.c_uint64),
        ("landing", ctypes.c_uint64),
        ("result", ctypes.c_uint64),
        ("bias", ctypes.c_uint64 * MAX_WEIGHTS),
        ("out_address", ctypes.c_uint64 * MAX_WEIGHTS),
        ("out_stride", ctypes.c_uint32 * MAX_WEIGHTS),
        ("n", ctypes.c_uint32 * MAX_WEIGHTS),
        ("weights", ctypes.c_uint32),
        ("order", ctypes.c_uint32),
        ("blocks", ctypes.c_uint32),
        ("pushes", ctypes.c_uint32),
        ("parts", ctypes.c_uint32),
        ("group_rows", ctypes.c_uint32),
        ("join", ctypes.c_uint32),
        ("band", ctypes.c_uint32),
    )


OUT_OFFSET, GATHERED_OFFSET = GatherArguments.out.offset, GatherArguments.gathered.offset


def assertions() -> str:
    """C++ text that fails to compile unless the mirror has the device's size and offsets."""
    size = padded_size(GatherArguments)
    lines = [
        f"static_assert(sizeof(mk::GatherArguments) == {size} && sizeof(mk::TensorMap) == {TENSOR_MAP_BYTES});",
        f"static_assert(mk::kMaxWeights == {MAX_WEIGHTS});",
        *offset_assertions("GatherArguments", GatherArguments),
    ]
    return "\n".join(lines) + "\n"
