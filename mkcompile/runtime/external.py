"""Tensors over memory that torch's allocator does not own, made and watched without a Python object that outlives them.

A tensor comes out of a DLPack capsule, whose deleter only frees the capsule's own words; whether its storage still
lives is asked when the memory is wanted again. Inductor may reuse a buffer in place or read a view of it, and a Python
object dies before its storage: only the storage tells.
"""

from __future__ import annotations

import ctypes
from math import prod
from typing import Any

import torch
from torch import Tensor

_DEVICES = {"cpu": 1, "cuda": 2}
_DTYPES = {torch.float16: (2, 16), torch.bfloat16: (4, 16)}
_NAME = b"dltensor"


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("index", ctypes.c_int))


class _Dtype(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Managed(ctypes.Structure):
    """DLManagedTensor. Source: dlpack.h, version 0.8."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("num_dims", ctypes.c_int),
        ("dtype", _Dtype),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_BLOCK_BYTES = ctypes.sizeof(_Managed)
_c_library = ctypes.CDLL(None)
_malloc = _c_library["malloc"]
_malloc.restype, _malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
# What is allocated with one is freed with the other, by torch and long after Python has gone.
_FREE = ctypes.cast(_c_library["free"], ctypes.c_void_p).value

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_from_capsule = torch._C._from_dlpack
is_expired: Any = torch.UntypedStorage._expired
free_watch: Any = torch.UntypedStorage._free_weak_ref


class Blueprint:
    """A contiguous tensor of one shape, dtype and device, wherever it may lie. Not thread-safe.

    Units: `size_bytes` bytes.
    """

    __slots__ = ("_managed", "_shape", "_source", "_strides", "size_bytes")

    def __init__(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        num_dims, (code, bits) = len(shape), _DTYPES[dtype]
        self._shape, self._strides = (ctypes.c_int64 * num_dims)(*shape), (ctypes.c_int64 * num_dims)(*strides)
        self._managed = _Managed(
            device=_Device(_DEVICES[device.type], device.index or 0),
            num_dims=num_dims,
            dtype=_Dtype(code, bits, 1),
            shape=self._shape,
            strides=self._strides,
            deleter=_FREE,
        )
        self._source = ctypes.addressof(self._managed)
        self.size_bytes = prod(shape) * bits // 8

    def at(self, address: int) -> Tensor:
        """A tensor at the address. Its memory must stay as long as its storage lives."""
        self._managed.data = address
        block = _malloc(_BLOCK_BYTES)
        ctypes.memmove(block, self._source, _BLOCK_BYTES)
        tensor: Tensor = _from_capsule(_new_capsule(block, _NAME, None))
        return tensor


def watch(tensor: Tensor) -> int:
    """A handle for `is_expired`, to be given back by `free_watch`."""
    storage: Any = tensor.untyped_storage()
    handle: int = storage._weak_ref()
    return handle
