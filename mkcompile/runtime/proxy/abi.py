"""The bytes that Python, the host proxy and kernels share: ctypes mirrors of `csrc/abi` and of `csrc/host/c_api.h`.

The shared library carries its own sizes and offsets; `drifted` compares them with these when it is loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

TRANSPORTS = ("emulated", "tcp", "rc", "unordered", "srd")
ORDERS = ("in_order", "shuffled", "uncounted")
REGISTRATIONS = ("none", "host", "dma-buf", "peermem", "bounce buffer", "refused")
WRITE_ORDERS = ("in order", "flushed", "unordered")
COUNTERS = (
    "commands", "batches", "partial_batches", "refusals", "completions", "bytes_sent", "arrivals", "stalls",
    "most_outstanding", "rounds", "longest_round",
)  # fmt: skip
NUM_COUNTERS = 16
EVENT_KINDS = ("taken", "posted", "completed", "arrived", "faulted")
MAX_ENDPOINT_BYTES = 8192
DEVICE_NAME_BYTES = 64
HOST_MEMORY, CUDA_MEMORY = 0, 1

_U32, _U64, _I32 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int32


class Command(ctypes.Structure):
    """One network write and the flag that follows it; `csrc/abi/command_ring.h` says how it is published."""

    _fields_ = (
        ("source_offset", _U64),
        ("destination_offset", _U64),
        ("bytes", _U64),
        ("peer", _U32),
        ("chunk", _U32),
        ("epoch", _U32),
        ("reserved", _U32),
        ("header", _U64),
    )


class RingControl(ctypes.Structure):
    """Credits that the proxy gives back; each word has a line of its own."""

    _fields_ = (
        ("consumed", _U64),
        ("_padding_0", _U64 * 15),
        ("retired", _U64),
        ("_padding_1", _U64 * 15),
        ("fault", _U32),
        ("_padding_2", _U32 * 31),
    )


class ProxyEvent(ctypes.Structure):
    """One entry of the timeline."""

    _fields_ = (
        ("time_ns", _U64),
        ("ticket", _U64),
        ("bytes", _U64),
        ("peer", _U32),
        ("chunk", _U32),
        ("epoch", _U32),
        ("kind_and_lane", _U32),
    )


class ProxyOptions(ctypes.Structure):
    """All settings of a proxy; `csrc/abi/proxy_records.h` says what each is."""

    _fields_ = (
        ("region_base", _U64),
        ("region_bytes", _U64),
        ("flags_offset", _U64),
        ("ring_control", _U64),
        ("ring_slots", _U64),
        ("copy_context", _U64),
        ("copy_start", _U64),
        ("copy_finished", _U64),
        ("copy_pin", _U64),
        ("copy_unpin", _U64),
        ("flag_context", _U64),
        ("flag_flush", _U64),
        ("flag_write", _U64),
        ("flag_commit", _U64),
        ("bounce_base", _U64),
        ("bounce_bytes", _U64),
        ("peer_bases", _U64),
        ("dmabuf_offset", _U64),
        ("window_ns", _U64),
        ("timeout_ns", _U64),
        ("idle_spin_ns", _U64),
        ("seed", _U64),
        ("bandwidth_bytes_per_s", _U64),
        ("latency_ns", _U64),
        ("shuffle_ns", _U64),
        ("transport", _U32),
        ("memory_kind", _U32),
        ("dmabuf", _I32),
        ("num_flags", _U32),
        ("rank", _U32),
        ("world", _U32),
        ("lanes", _U32),
        ("max_outstanding", _U32),
        ("ring_capacity", _U32),
        ("timeline_capacity", _U32),
        ("order", _U32),
        ("write_order", _U32),
        ("always_bounces", _U32),
        ("reserved", _U32),
        ("device", ctypes.c_char * DEVICE_NAME_BYTES),
    )


class Error(ctypes.Structure):
    """A failure; `number` is an errno value, 0 for none."""

    _fields_ = (
        ("number", _I32),
        ("peer", _I32),
        ("call", ctypes.c_char * 40),
        ("device", ctypes.c_char * 40),
        ("detail", ctypes.c_char * 176),
    )


class Facts(ctypes.Structure):
    """What a proxy is made of."""

    _fields_ = (
        ("ring_control", _U64),
        ("ring_slots", _U64),
        ("registration", _U32),
        ("counts", _U32),
        ("device", ctypes.c_char * DEVICE_NAME_BYTES),
    )


class CudaHooks(ctypes.Structure):
    """Functions of a CUDA engine, as `ProxyOptions` takes them."""

    _fields_ = (
        ("context", _U64),
        ("copy_start", _U64),
        ("copy_finished", _U64),
        ("copy_pin", _U64),
        ("copy_unpin", _U64),
        ("flag_write", _U64),
        ("flag_commit", _U64),
        ("write_order", _U32),
        ("reserved", _U32),
    )


class Layout(ctypes.Structure):
    """Where the library has one field of a structure; an empty field name stands for the whole."""

    _fields_ = (("structure", ctypes.c_char_p), ("field", ctypes.c_char_p), ("offset", _U64), ("bytes", _U64))


MIRRORS: dict[str, type[ctypes.Structure]] = {
    "Command": Command,
    "RingControl": RingControl,
    "ProxyEvent": ProxyEvent,
    "ProxyOptions": ProxyOptions,
    "Error": Error,
    "MkFacts": Facts,
    "MkHooks": CudaHooks,
}


def drifted(layouts: Iterable[Layout]) -> list[str]:
    """What differs between the library and the mirrors, a line each."""
    wrong = []
    told: dict[str, set[str]] = {name: set() for name in MIRRORS}
    for layout in layouts:
        structure, field = layout.structure.decode(), layout.field.decode()
        mirror = MIRRORS.get(structure)
        if mirror is None or (field and not hasattr(mirror, field)):
            wrong.append(f"{structure}.{field} is not known here")
            continue
        told[structure].add(field)
        here = (0, ctypes.sizeof(mirror)) if not field else (getattr(mirror, field).offset, getattr(mirror, field).size)
        if here != (layout.offset, layout.bytes):
            wrong.append(f"{structure}.{field}: offset and bytes are {(layout.offset, layout.bytes)}, here {here}")
    for structure, mirror in MIRRORS.items():
        own = {name for name, *_ in mirror._fields_ if not name.startswith(("_", "reserved"))}
        wrong += [f"{structure}.{field} is not in the library" for field in sorted({"", *own} - told[structure])]
    return wrong
