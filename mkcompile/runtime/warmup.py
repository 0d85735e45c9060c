"""Compile kernels ahead of their first use, in as many processes as asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from mkcompile.runtime.kernel import CompiledKernel, compile_kernel
from mkcompile.runtime.kernel_config import KernelConfig


def warm_up(configs: Iterable[KernelConfig], num_processes: int) -> Iterator[CompiledKernel]:
    """Compile into the cache folder; yields each kernel as it is done.

    Raises: CompileError; UnsupportedDeviceError where NVRTC is not installed.
    """
    context = get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        yield from pool.map(compile_kernel, configs, chunksize=1)
