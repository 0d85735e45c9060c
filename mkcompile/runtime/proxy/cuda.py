"""Copies and flags for regions in the memory of CUDA devices, made by the proxy's thread through the driver."""

from __future__ import annotations

import ctypes
import os
import weakref
from dataclasses import dataclass, replace
from typing import cast

from mkcompile.errors import NoDeviceError
from mkcompile.runtime.proxy import abi
from mkcompile.runtime.proxy.failures import exception_of
from mkcompile.runtime.proxy.library import library
from mkcompile.runtime.proxy.settings import Hooks, Region, WriteOrder

#: As many as keep 50 GB/s in messages of 256 KB. Source: docs/decisions/321-emulated-link.md.
MOST_STREAMS = 4


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class CudaEngine:
    """Streams of a device: some copy, some write flags. For one proxy at a time, which it must outlive."""

    handle: int
    hooks: abi.CudaHooks

    @property
    def write_order(self) -> WriteOrder:
        """Does a kernel that polls a flag see what a NIC wrote before it?"""
        return cast(WriteOrder, abi.WRITE_ORDERS[self.hooks.write_order])


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class DmaBuf:
    """A descriptor through which NICs reach device memory, closed with this. `offset_bytes`: of the memory in it."""

    descriptor: int
    offset_bytes: int


def open_engine(device_idx: int, streams: int = MOST_STREAMS) -> CudaEngine:
    """An engine on the device's primary context, which torch uses too. `streams` for copies and as many for flags, one
    for both where it is 1: the more, the more bandwidth, and the more of the device's queues.

    Raises: NoDeviceError without a driver or device; ProxyUnavailableError without the proxy's library.
    """
    handle, hooks, error = ctypes.c_void_p(), abi.CudaHooks(), abi.Error()
    places = ctypes.byref(handle), ctypes.byref(hooks), ctypes.byref(error)
    if library().mk_cuda_engine_open(device_idx, streams, *places):
        raise exception_of(error)
    assert handle.value is not None
    engine = CudaEngine(handle=handle.value, hooks=hooks)
    weakref.finalize(engine, library().mk_cuda_engine_close, handle.value)
    return engine


def cuda_hooks(
    engine: CudaEngine, peer_bases: tuple[int, ...] = (), bounce_base: int = 0, bounce_bytes: int = 0
) -> Hooks:
    """The engine as a proxy takes it. `peer_bases`: every rank's region as mapped here, for `emulated`. `bounce_base`:
    pinned memory, for networks that can't reach the device's.
    """
    bases = (ctypes.c_uint64 * len(peer_bases))(*peer_bases)
    return Hooks(
        copy_context=engine.hooks.context,
        copy_start=engine.hooks.copy_start,
        copy_finished=engine.hooks.copy_finished,
        copy_pin=engine.hooks.copy_pin,
        copy_unpin=engine.hooks.copy_unpin,
        flag_context=engine.hooks.context,
        flag_write=engine.hooks.flag_write,
        flag_commit=engine.hooks.flag_commit,
        bounce_base=bounce_base,
        bounce_bytes=bounce_bytes,
        peer_bases=ctypes.addressof(bases) if peer_bases else 0,
        write_order=engine.write_order,
        keep=(engine, bases),
    )


def export(engine: CudaEngine, address: int, size_bytes: int) -> DmaBuf:
    """Device memory as a NIC can register it.

    Raises: NoDeviceError where the device or its driver exports none.
    """
    descriptor, offset, error = ctypes.c_int(-1), ctypes.c_uint64(), abi.Error()
    outcome = ctypes.byref(descriptor), ctypes.byref(offset), ctypes.byref(error)
    if library().mk_cuda_export(engine.handle, address, size_bytes, *outcome):
        raise exception_of(error)
    exported = DmaBuf(descriptor=descriptor.value, offset_bytes=offset.value)
    weakref.finalize(exported, os.close, descriptor.value)
    return exported


def exported(engine: CudaEngine, region: Region) -> Region:
    """The region with a dma-buf, or as it is where there is none: then the other ways of registration are left."""
    try:
        buffer = export(engine, region.address, region.size_bytes)
    except NoDeviceError:
        return region
    return replace(
        region,
        dmabuf=buffer.descriptor,
        dmabuf_offset_bytes=buffer.offset_bytes,
        keep=(region.keep, buffer),
    )
