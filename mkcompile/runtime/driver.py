"""The few calls of the CUDA driver that launches need, through ctypes: a launch costs microseconds on the host."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from mkcompile.errors import MkcompileError, UnsupportedDeviceError

_COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PEER_ACCESS_ALREADY_ENABLED = 704
_HOST_PORTABLE_AND_MAPPED = 3


class DriverError(MkcompileError, RuntimeError):
    """A driver call failed; the message names the call and the driver's reason."""


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute, of which only the integer value is used."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_char * 4), ("value", ctypes.c_int * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


@cache
def library() -> Any:
    """libcuda, loaded once.

    Raises: UnsupportedDeviceError where there is no driver.
    """
    try:
        lib = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UnsupportedDeviceError(f"fused kernels need an NVIDIA driver: {error}") from error
    code = lib.cuInit(0)
    if code:
        raise UnsupportedDeviceError(f"fused kernels need a GPU that the driver can use: cuInit says {code}")
    return lib


def check(call: str, code: int) -> None:
    """Raises: DriverError unless the call succeeded."""
    if code == 0:
        return
    text = ctypes.c_char_p()
    library().cuGetErrorString(code, ctypes.byref(text))
    raise DriverError(f"{call}: {text.value.decode() if text.value else 'unknown error'} ({code})")


def require_hopper(capability: tuple[int, int]) -> None:
    """Raises: UnsupportedDeviceError unless the device runs sm_90a code."""
    if capability != (9, 0):
        raise UnsupportedDeviceError(
            f"fused kernels are built for compute capability 9.0 (H100, H200); this device has "
            f"{capability[0]}.{capability[1]}, so operators run unfused"
        )


class PrimaryContext:
    """Make a device's primary context, the one that torch uses, current for a `with` block."""

    def __init__(self, device_idx: int) -> None:
        self._device_idx = device_idx

    def __enter__(self) -> ctypes.c_void_p:
        device, context = ctypes.c_int(), ctypes.c_void_p()
        check("cuDeviceGet", library().cuDeviceGet(ctypes.byref(device), self._device_idx))
        check("cuDevicePrimaryCtxRetain", library().cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        check("cuCtxPushCurrent", library().cuCtxPushCurrent_v2(context))
        return context

    def __exit__(self, *_: object) -> None:
        library().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def load_function(image: bytes, name: str, shared_bytes: int, device_idx: int) -> ctypes.c_void_p:
    """Load machine code on one device, eagerly, and return its kernel with its shared-memory limit raised.

    The module stays loaded for the life of the process: kernels are few, and a graph may refer to one for ever.
    """
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with PrimaryContext(device_idx):
        check("cuModuleLoadData", library().cuModuleLoadData(ctypes.byref(module), image))
        check("cuModuleGetFunction", library().cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        code = library().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared_bytes)
        check("cuFuncSetAttribute", code)
        if hasattr(library(), "cuFuncLoad"):
            check("cuFuncLoad", library().cuFuncLoad(function))
    return function


def cooperative_attribute() -> LaunchAttribute:
    """All blocks of the launch are resident at once, or the launch fails."""
    attribute = LaunchAttribute(id=_COOPERATIVE)
    attribute.value[0] = 1
    return attribute


def early_attribute() -> LaunchAttribute:
    """Blocks may start while the kernel before them in the stream ends: they wait for it by themselves."""
    attribute = LaunchAttribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION)
    attribute.value[0] = 1
    return attribute


def cluster_attribute(num_blocks: int) -> LaunchAttribute:
    """Runs of so many blocks share a corner of the chip and reach each other's shared memory."""
    attribute = LaunchAttribute(id=_CLUSTER_DIMENSION)
    attribute.value[0], attribute.value[1], attribute.value[2] = num_blocks, 1, 1
    return attribute


def enable_peer_access(device_idx: int, peer_idx: int) -> None:
    """Let kernels on one device of this process reach another's memory."""
    with PrimaryContext(peer_idx) as peer_context, PrimaryContext(device_idx):
        code = library().cuCtxEnablePeerAccess(peer_context, 0)
    if code != _PEER_ACCESS_ALREADY_ENABLED:
        check("cuCtxEnablePeerAccess", code)


def allocate_mapped(num_bytes: int, device_idx: int) -> int:
    """Zeroed host memory that all devices see at the same address; never freed."""
    pointer = ctypes.c_void_p()
    with PrimaryContext(device_idx):
        code = library().cuMemHostAlloc(ctypes.byref(pointer), ctypes.c_size_t(num_bytes), _HOST_PORTABLE_AND_MAPPED)
    check("cuMemHostAlloc", code)
    assert pointer.value is not None
    ctypes.memset(pointer.value, 0, num_bytes)
    return pointer.value
