"""Events and captures of the driver, by ctypes: what the chain of launches asks for."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from mkcompile.errors import UnsupportedDeviceError
from mkcompile.runtime import driver

_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_CAPTURE_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
# The newest form of the call comes first; `outputs` are its pointers after the stream.
_CAPTURE_INFO = (("cuStreamGetCaptureInfo_v3", 6), ("cuStreamGetCaptureInfo_v2", 5))


def _function(name: str, *argument_types: Any) -> Any:
    # by index: a function object of our own, whose argument types nobody else sees
    found = driver.library()[name]
    found.argtypes = argument_types
    return found


def _capture_function() -> tuple[Any, tuple[None, ...]]:
    """The call and the pointers after status and id that it is given as null."""
    for name, outputs in _CAPTURE_INFO:
        try:
            return _function(name, *(ctypes.c_void_p,) * (outputs + 1)), (None,) * (outputs - 2)
        except AttributeError:
            continue
    raise UnsupportedDeviceError("the CUDA driver is too old to tell of captures; it must support CUDA 12 or newer")


class DriverStreams:
    """Streams and events of one device, which must be current in the calling thread."""

    def __init__(self) -> None:
        self._create = _function("cuEventCreate", ctypes.c_void_p, ctypes.c_uint)
        self._record = _function("cuEventRecord", ctypes.c_void_p, ctypes.c_void_p)
        self._wait = _function("cuStreamWaitEvent", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
        self._capture, self._rest = _capture_function()
        self._is_capturing = torch._C._cuda_isCurrentStreamCapturing
        self._status = ctypes.c_int()
        self._id = ctypes.c_uint64()
        self._status_address = ctypes.addressof(self._status)
        self._id_address = ctypes.addressof(self._id)

    def create_event(self) -> int:
        """An event without timing; lives as long as the process."""
        event = ctypes.c_void_p()
        driver.check("cuEventCreate", self._create(ctypes.addressof(event), _DISABLE_TIMING))
        assert event.value is not None
        return event.value

    def record_event(self, event: int, stream: int) -> None:
        """Raises: DriverError."""
        code = self._record(event, stream)
        if code:
            driver.check("cuEventRecord", code)

    def wait_event(self, stream: int, event: int) -> None:
        """Raises: DriverError."""
        driver.check("cuStreamWaitEvent", self._wait(stream, event, 0))

    def capture_id(self, stream: int) -> int:
        """Which capture the stream, torch's current one, is part of; 0 for none. Raises: DriverError.

        Torch's question comes first: it is cheaper, and it makes the device's context current in a new thread.
        """
        if not self._is_capturing():
            return 0
        code = self._capture(stream, self._status_address, self._id_address, *self._rest)
        if code:
            driver.check("cuStreamGetCaptureInfo", code)
        return self._id.value if self._status.value == _CAPTURE_ACTIVE else 0
