"""The bytes that Python and the device share: ctypes mirrors of `csrc/abi`, and C++ assertions that they agree.

Every compiled kernel carries the assertions, so a mirror that has drifted is a compile error, not a wrong result.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TypeVar

_Mirror = TypeVar("_Mirror", bound=ctypes.Structure)

MAX_WORLD = 16
MAX_TERMS = 4
TENSOR_MAP_BYTES = 128
MAP_ALIGNMENT_BYTES = 64
WORKSPACE_HEADER_BYTES = 512
NUM_FLAG_KINDS = 5
#: Of the network block of a workspace. Source: csrc/abi/network_arguments.h.
MAX_NODES = 16
NETWORK_HEADER_BYTES = 512
NUM_NETWORK_FLAG_KINDS = 4

OPERATORS = ("gemm", "gemm_reduce_scatter", "gemm_all_reduce", "all_gather_gemm")
ROLES = (
    "load", "compute", "store", "signal", "copy", "entry", "network send", "network receive", "network entry",
)  # fmt: skip
#: Roles that wait for a rail peer: what they report as the peer is its node.
NETWORK_ROLES = range(6, 9)

NO_FAULT = 0
PEER_TIMEOUT = 1
LAUNCH_ORDER = 2
LOCAL_STALL = 3
LAUNCH_MISMATCH = 4
REPLAY_AFTER_FAULT = 5
NETWORK_FAULT = 6
PEER_GAVE_UP = 7

#: What a trace record is about, and who in a block wrote it.
TRACE_ROLES = (
    "block", "load", "mainloop", "epilogue", "receive", "store", "push", "signal", "copy", "net_send", "net_receive"
)  # fmt: skip
TRACE_LANES = ("load", "compute 0", "compute 1", "store 0", "store 1", "signal", "copy", "extra", "entry")
NO_TILE = 0xFFFFFFFF


class FaultReport(ctypes.Structure):
    """What a wait saw when it gave up; `code` is written last."""

    _fields_ = (
        ("code", ctypes.c_uint32),
        ("op", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("peer", ctypes.c_uint32),
        ("role", ctypes.c_uint32),
        ("tile", ctypes.c_uint32),
        ("expected", ctypes.c_uint32),
        ("seen", ctypes.c_uint32),
        ("waited_ns", ctypes.c_uint64),
        ("block", ctypes.c_uint32),
        ("thread", ctypes.c_uint32),
    )


class WorkspaceHeader(ctypes.Structure):
    """First bytes of a workspace."""

    _fields_ = (
        ("epoch", ctypes.c_uint32),
        ("blocks_in", ctypes.c_uint32),
        ("blocks_out", ctypes.c_uint32),
        ("abort", ctypes.c_uint32),
        ("lost_peer", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32 * 59),
        ("entered", ctypes.c_uint64 * MAX_WORLD * 2),
    )


class KernelArguments(ctypes.Structure):
    """`mk::LaunchArguments`, the one parameter of every kernel; its header says what each field is."""

    _fields_ = (
        ("a", ctypes.c_uint64 * 16 * MAX_TERMS),
        ("weight", ctypes.c_uint64 * 16 * MAX_TERMS),
        ("out", ctypes.c_uint64 * 16),
        ("peer_out", ctypes.c_uint64 * 16 * MAX_WORLD),
        ("workspace", ctypes.c_uint64 * MAX_WORLD),
        ("multicast", ctypes.c_uint64),
        ("bias", ctypes.c_uint64),
        ("fault", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_uint64),
        ("region_offset", ctypes.c_uint64),
        ("region_bytes", ctypes.c_uint64),
        ("final_offset", ctypes.c_uint64),
        ("out_address", ctypes.c_uint64),
        ("mailbox_offset", ctypes.c_uint64),
        ("mailbox_bytes", ctypes.c_uint64),
        ("trace", ctypes.c_uint64),
        ("m", ctypes.c_uint32),
        ("n", ctypes.c_uint32),
        ("k", ctypes.c_uint32 * MAX_TERMS),
        ("terms", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("world", ctypes.c_uint32),
        ("segments", ctypes.c_uint32),
        ("segment_rows", ctypes.c_uint32),
        ("raster_group", ctypes.c_uint32),
        ("lag", ctypes.c_uint32),
        ("slots", ctypes.c_uint32),
        ("max_tiles", ctypes.c_uint32),
        ("pace_ns", ctypes.c_uint32),
        ("scale", ctypes.c_float),
        ("out_stride", ctypes.c_uint32),
        ("identity", ctypes.c_uint32),
        ("is_captured", ctypes.c_uint32),
        ("trace_blocks", ctypes.c_uint32),
        ("trace_records", ctypes.c_uint32),
        ("trace_launch", ctypes.c_uint32),
        ("adds", ctypes.c_uint32),
    )


class TraceRecord(ctypes.Structure):
    """One task of one thread; `role` indexes TRACE_ROLES."""

    _fields_ = (
        ("start_ns", ctypes.c_uint64),
        ("end_ns", ctypes.c_uint64),
        ("waited_ns", ctypes.c_uint32),
        ("tile", ctypes.c_uint32),
        ("launch", ctypes.c_uint32),
        ("role", ctypes.c_uint8),
        ("owner", ctypes.c_uint8),
        ("reserved", ctypes.c_uint8 * 2),
    )


class TraceLaneHeader(ctypes.Structure):
    """Before the records of each lane: how many were written."""

    _fields_ = (("written", ctypes.c_uint64), ("reserved", ctypes.c_uint64 * 3))


def aligned_block(mirror: type[_Mirror]) -> _Mirror:
    """A zeroed block that lies as the driver wants tensor maps, which come first in it and are whole multiples.

    Behind it there is room for the padding, which the driver reads, too.
    """
    storage = (ctypes.c_char * (padded_size(mirror) + MAP_ALIGNMENT_BYTES))()
    return mirror.from_buffer(storage, -ctypes.addressof(storage) % MAP_ALIGNMENT_BYTES)


def aligned_copy(block: _Mirror) -> _Mirror:
    """Another such block with the same content."""
    twin = aligned_block(type(block))
    ctypes.memmove(ctypes.addressof(twin), ctypes.addressof(block), ctypes.sizeof(block))
    return twin


@cache
def padded_size(mirror: type[ctypes.Structure]) -> int:
    """Size on the device of what holds tensor maps: padded to their alignment."""
    return -(-ctypes.sizeof(mirror) // MAP_ALIGNMENT_BYTES) * MAP_ALIGNMENT_BYTES


def offset_assertions(name: str, mirror: type[ctypes.Structure], place: str = "", base: int = 0) -> list[str]:
    """C++ text: each field of a mirror lies where the device has it; `place`, `base`: of the mirror in `name`."""
    # NVRTC has no offsetof; this is the front end's own constant form of it.
    return [
        f"static_assert(__INTADDR__(&((mk::{name}*)0)->{place}{field}) == {base + getattr(mirror, field).offset});"
        for field, *_ in mirror._fields_
    ]


_MIRRORS: tuple[tuple[str, type[ctypes.Structure]], ...] = (
    ("LaunchArguments", KernelArguments),
    ("FaultReport", FaultReport),
    ("WorkspaceHeader", WorkspaceHeader),
    ("TraceRecord", TraceRecord),
    ("TraceLaneHeader", TraceLaneHeader),
)


def assertions() -> str:
    """C++ text that fails to compile unless every mirror has the device's size and offsets."""
    lines = [
        f"static_assert(mk::kMaxWorld == {MAX_WORLD} && mk::kMaxTerms == {MAX_TERMS});",
        f"static_assert(sizeof(mk::WorkspaceHeader) == {WORKSPACE_HEADER_BYTES});",
        f"static_assert(mk::kFlagKinds == {NUM_FLAG_KINDS});",
        f"static_assert(mk::kTraceRoles == {len(TRACE_ROLES)} && mk::kTraceLanes == {len(TRACE_LANES)});",
    ]
    for name, mirror in _MIRRORS:
        size = padded_size(mirror) if mirror is KernelArguments else ctypes.sizeof(mirror)
        lines += [f"static_assert(sizeof(mk::{name}) == {size});", *offset_assertions(name, mirror)]
    return "\n".join(lines) + "\n"
