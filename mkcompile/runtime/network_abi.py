"""`csrc/abi/network_arguments.h` in ctypes: what kernels whose ranks are on several nodes have besides."""

from __future__ import annotations

import ctypes

from mkcompile.runtime.abi import (
    MAX_NODES,
    NETWORK_HEADER_BYTES,
    NUM_NETWORK_FLAG_KINDS,
    KernelArguments,
    offset_assertions,
    padded_size,
)

COMMAND_BYTES = 48
RING_CONTROL_BYTES = 384

_U32, _U64 = ctypes.c_uint32, ctypes.c_uint64


class NetworkHeader(ctypes.Structure):
    """First bytes of the network block of a workspace."""

    _fields_ = (
        ("tickets", _U64),
        ("consumed", _U64),
        ("reserved_0", _U64 * 14),
        ("entry", _U64 * 2),
        ("reserved_1", _U64 * 14),
        ("entered", _U64 * MAX_NODES * 2),
    )


class NetworkArguments(ctypes.Structure):
    """`mk::NetworkArguments`; its header says what each field is."""

    _fields_ = (
        ("ring_control", _U64),
        ("ring_slots", _U64),
        ("header_offset", _U64),
        ("flags_offset", _U64),
        ("counters_offset", _U64),
        ("inbox_offset", _U64),
        ("outbox_offset", _U64),
        ("final_inbox_offset", _U64),
        ("final_outbox_offset", _U64),
        ("ring_capacity", _U32),
        ("node", _U32),
        ("nodes", _U32),
        ("max_chunks", _U32),
        ("chunk_tiles", _U32),
        ("slots", _U32),
        ("lag", _U32),
        ("reserved", _U32),
    )


class NetworkLaunchArguments(KernelArguments):
    """`mk::NetworkLaunchArguments`: behind the padding of its base."""

    _fields_ = (  # type: ignore[assignment]  # ctypes adds them to those of the base
        ("_padding", ctypes.c_uint8 * (padded_size(KernelArguments) - ctypes.sizeof(KernelArguments))),
        ("net", NetworkArguments),
    )


def assertions() -> str:
    """C++ text that fails to compile unless the mirrors have the device's sizes and offsets."""
    size, base = padded_size(NetworkLaunchArguments), NetworkLaunchArguments.net.offset
    lines = [
        f"static_assert(sizeof(mk::NetworkLaunchArguments) == {size} && mk::kMaxNodes == {MAX_NODES});",
        f"static_assert(sizeof(mk::NetworkHeader) == {NETWORK_HEADER_BYTES});",
        f"static_assert(mk::kNetFlagKinds == {NUM_NETWORK_FLAG_KINDS});",
        f"static_assert(sizeof(mk::Command) == {COMMAND_BYTES} && sizeof(mk::RingControl) == {RING_CONTROL_BYTES});",
        f"static_assert(mk::kNetworkEntryOffset == {NetworkHeader.entry.offset});",
        f"static_assert(mk::kNetworkEnteredOffset == {NetworkHeader.entered.offset});",
        *offset_assertions("NetworkHeader", NetworkHeader),
        *offset_assertions("NetworkLaunchArguments", NetworkArguments, "net.", base),
    ]
    return "\n".join(lines) + "\n"
