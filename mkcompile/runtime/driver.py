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
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


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


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


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


def allocate(num_bytes: int, zeroed_bytes: int, device_idx: int) -> int:
    """Device memory, its first bytes zero. On a stream of its own: other work may wait for a peer that waits for us.

    Raises: DriverError, and then nothing is left allocated.
    """
    address, stream, lib = ctypes.c_uint64(), ctypes.c_void_p(), library()
    with PrimaryContext(device_idx):
        check("cuMemAlloc", lib.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(num_bytes)))
        try:
            check("cuStreamCreate", lib.cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING))
            zeroed = lib.cuMemsetD8Async(address, ctypes.c_ubyte(0), ctypes.c_size_t(zeroed_bytes), stream)
            zeroed = zeroed or lib.cuStreamSynchronize(stream)
            lib.cuStreamDestroy_v2(stream)
            check("cuMemsetD8Async", zeroed)
        except DriverError:
            lib.cuMemFree_v2(address)
            raise
    return address.value


def free(address: int, device_idx: int) -> None:
    """What `allocate` returned; at the end of the process the driver may be gone, and with it the memory."""
    with PrimaryContext(device_idx):
        library().cuMemFree_v2(ctypes.c_uint64(address))


def export_memory(address: int, device_idx: int) -> bytes:
    """The handle by which other processes of this host map a block of `allocate`.

    Raises: DriverError.
    """
    handle = IpcHandle()
    with PrimaryContext(device_idx):
        check("cuIpcGetMemHandle", library().cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(address)))
    return bytes(handle)


def import_memory(handle: bytes, device_idx: int) -> int:
    """Where a block of another process is mapped now.

    Raises: DriverError.
    """
    address = ctypes.c_uint64()
    with PrimaryContext(device_idx):
        code = library().cuIpcOpenMemHandle_v2(
            ctypes.byref(address), IpcHandle.from_buffer_copy(handle), ctypes.c_uint(_LAZY_PEER_ACCESS)
        )
    check("cuIpcOpenMemHandle", code)
    return address.value


def forget_memory(address: int, device_idx: int) -> None:
    """End a mapping of `import_memory`."""
    with PrimaryContext(device_idx):
        library().cuIpcCloseMemHandle(ctypes.c_uint64(address))


def free_mapped(address: int, device_idx: int) -> None:
    """What `allocate_mapped` returned, when no kernel and no thread uses it."""
    with PrimaryContext(device_idx):
        library().cuMemFreeHost(ctypes.c_void_p(address))


def allocate_mapped(num_bytes: int, device_idx: int) -> int:
    """Zeroed host memory that all devices see at the same address."""
    pointer = ctypes.c_void_p()
    with PrimaryContext(device_idx):
        code = library().cuMemHostAlloc(ctypes.byref(pointer), ctypes.c_size_t(num_bytes), _HOST_PORTABLE_AND_MAPPED)
    check("cuMemHostAlloc", code)
    assert pointer.value is not None
    ctypes.memset(pointer.value, 0, num_bytes)
    return pointer.value
