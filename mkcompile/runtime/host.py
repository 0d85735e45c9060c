"""What every launch asks of torch, bound once for a device: C functions, as each Python frame costs 0.1 us."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

#: Sizes, strides and dtype to an empty tensor on the current device, in the allocator's ordinary memory.
Empty = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """`device_idx` is what `current_device` returns where the device is the calling thread's; streams are raw."""

    device_idx: int
    current_device: Callable[[], int]
    current_stream: Callable[[], int]
    empty: Empty


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Units: elements."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 1, 0, -1):
        strides[i - 1] = strides[i] * max(shape[i], 1)
    return tuple(strides)
