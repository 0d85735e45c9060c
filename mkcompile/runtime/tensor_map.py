"""Tensor maps: what the copy engine of an SM must know of a matrix to load or store boxes of it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from mkcompile.errors import OperatorInputError
from mkcompile.runtime import driver
from mkcompile.runtime.abi import TENSOR_MAP_BYTES

_DATA_TYPES = {"float16": 6, "bfloat16": 9}
_SWIZZLES = {32: 1, 64: 2, 128: 3}
_L2_PROMOTION_256B = 3
_ELEMENT_BYTES = 2
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Matrix:
    """A row-major matrix on a device: `pointer` to element [0, 0]; rows lie `stride` elements apart.

    Raises: OperatorInputError where the copy engine can't reach it (16-byte alignment of base and rows).
    """

    pointer: int
    rows: int
    columns: int
    stride: int

    def __post_init__(self) -> None:
        if self.pointer % _ALIGNMENT_BYTES or self.stride * _ELEMENT_BYTES % _ALIGNMENT_BYTES:
            raise OperatorInputError(
                f"a {self.rows}x{self.columns} operand at {self.pointer:#x} with rows {self.stride} elements apart is "
                f"not aligned to 16 bytes; sizes and offsets must be multiples of 8 elements"
            )

    @staticmethod
    def of(tensor: torch.Tensor) -> Matrix:
        """A view [rows, columns] of a tensor with contiguous rows.

        Raises: OperatorInputError otherwise.
        """
        if tensor.dim() != 2 or (tensor.stride(1) != 1 and tensor.shape[1] != 1):
            raise OperatorInputError(f"shape {tuple(tensor.shape)}, strides {tensor.stride()}: rows must be contiguous")
        rows, columns = tensor.shape
        stride = tensor.stride(0) if rows > 1 else -(-columns // 8) * 8
        return Matrix(tensor.data_ptr(), rows, columns, stride)


@lru_cache(maxsize=4096)
def encode(
    pointer: int, dtype: str, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle_bytes: int
) -> bytes:
    """A map of a 2-D or 3-D array of 16-bit elements, innermost dimension first.

    Units: `sizes` and `box` elements; `strides` elements, of all dimensions but the innermost.
    """
    rank = len(sizes)
    storage = ctypes.create_string_buffer(TENSOR_MAP_BYTES + 64)
    aligned = (ctypes.addressof(storage) + 63) // 64 * 64
    code = driver.library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        _DATA_TYPES[dtype],
        rank,
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*(stride * _ELEMENT_BYTES for stride in strides)),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*(1 for _ in range(rank))),
        0,
        _SWIZZLES[swizzle_bytes],
        _L2_PROMOTION_256B,
        0,
    )
    driver.check(f"cuTensorMapEncodeTiled(sizes={tuple(sizes)}, strides={tuple(strides)}, box={tuple(box)})", code)
    return ctypes.string_at(aligned, TENSOR_MAP_BYTES)


def move(map_address: int, pointer: int) -> None:
    """Let a map that lies at an aligned address describe an array elsewhere, of the same sizes and strides."""
    code = driver.library().cuTensorMapReplaceAddress(ctypes.c_void_p(map_address), ctypes.c_void_p(pointer))
    if code:
        driver.check(f"cuTensorMapReplaceAddress({pointer:#x})", code)
