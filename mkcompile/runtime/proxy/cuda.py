"""Copies and flags for regions in the memory of CUDA devices, made by the proxy's thread through the driver."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass

from mkcompile.runtime.proxy import abi
from mkcompile.runtime.proxy.failures import exception_of
from mkcompile.runtime.proxy.library import library
from mkcompile.runtime.proxy.settings import Hooks


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class CudaEngine:
    """Streams of a device: some copy, some write flags. For one proxy at a time, which it must outlive."""

    handle: int
    hooks: abi.CudaHooks


def open_engine(device_idx: int) -> CudaEngine:
    """An engine on the device's primary context, which torch uses too.

    Raises: NoDeviceError without a driver or device; ProxyUnavailableError without the proxy's library.
    """
    handle, hooks, error = ctypes.c_void_p(), abi.CudaHooks(), abi.Error()
    if library().mk_cuda_engine_open(device_idx, ctypes.byref(handle), ctypes.byref(hooks), ctypes.byref(error)):
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
        flag_context=engine.hooks.context,
        flag_write=engine.hooks.flag_write,
        flag_commit=engine.hooks.flag_commit,
        bounce_base=bounce_base,
        bounce_bytes=bounce_bytes,
        peer_bases=ctypes.addressof(bases) if peer_bases else 0,
        keep=(engine, bases),
    )
