"""Which calls wait for a kernel, and hold up the copies of another thread meanwhile? Prints a JSON line for each call.

    python -m tests.gpu.held_calls [--apart] [--out FILE]

A kernel waits as one over nodes does that waits for its proxy; a thread copies as a proxy does; then this thread makes
the call, for the first time in the process. `call_ms` near the kernel's limit: the call waited for it. `held_ms` near
it: so did the proxy, and a kernel that waits for the proxy would wait until its deadline. `--apart`: the thread has a
context of its own, and stores flags, too. Units: milliseconds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mkcompile.runtime import driver
from mkcompile.runtime.kernel import OPTIONS
from mkcompile.runtime.kernel_cache import compiled

LIMIT_MS = 300
_SOURCE = r"""
extern "C" __global__ void wait_for(const volatile unsigned* word, unsigned long long limit_ns) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (*word == 0 && now - start < limit_ns);
}
"""
_PAGE = 4096
_NOT_READY = 600  # CUDA_ERROR_NOT_READY


def image() -> bytes:
    """The waiting kernel's machine code."""
    return compiled("wait_for", _SOURCE, OPTIONS).image


@contextmanager
def another_context() -> Iterator[None]:
    """A second context of the device, made on this thread and for it."""
    context = ctypes.c_void_p()
    driver.check("cuCtxCreate", driver.library().cuCtxCreate_v2(ctypes.byref(context), 0, 0))
    try:
        yield
    finally:
        driver.library().cuCtxDestroy_v2(context)


class Copier:
    """A thread that copies 8 bytes from pinned memory again and again, on a stream of its own. `apart`: in a context of
    its own, and it stores a flag in the memory of the first one behind each copy.
    """

    def __init__(self, apart: bool) -> None:
        self._apart = apart
        self.longest_ms, self.rounds, self._ends = 0.0, 0, threading.Event()
        self._pinned = driver.allocate_mapped(_PAGE, 0)
        self._device = driver.allocate(_PAGE, _PAGE, 0)
        self._stream, self._event = ctypes.c_void_p(), ctypes.c_void_p()
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def await_rounds(self, number: int) -> None:
        """Until there are so many more. Raises: AssertionError where the thread has ended."""
        end = self.rounds + number
        while self.rounds < end:
            assert self._thread.is_alive()
            time.sleep(0)

    def end(self) -> None:
        """The thread has ended."""
        self._ends.set()
        self._thread.join()

    def _copy(self) -> None:
        lib, size = driver.library(), ctypes.c_size_t(8)
        to, source = ctypes.c_uint64(self._device), ctypes.c_uint64(self._pinned)
        flag, value = ctypes.c_uint64(self._device + 64), ctypes.c_uint32(7)
        with another_context() if self._apart else driver.PrimaryContext(0):
            driver.check("cuStreamCreate", lib.cuStreamCreate(ctypes.byref(self._stream), 1))
            driver.check("cuEventCreate", lib.cuEventCreate(ctypes.byref(self._event), 2))
            while not self._ends.is_set():
                started = time.monotonic()
                driver.check("cuMemcpyAsync", lib.cuMemcpyAsync(to, source, size, self._stream))
                if self._apart:
                    driver.check("cuStreamWriteValue32", lib.cuStreamWriteValue32_v2(self._stream, flag, value, 0))
                driver.check("cuEventRecord", lib.cuEventRecord(self._event, self._stream))
                while (code := lib.cuEventQuery(self._event)) == _NOT_READY:
                    pass
                driver.check("cuEventQuery", code)
                self.longest_ms = max(self.longest_ms, 1e3 * (time.monotonic() - started))
                self.rounds += 1


def calls() -> dict[str, Callable[[], object]]:
    """By name, in the order in which they are made."""
    kept: list[Any] = []
    x, y = (torch.randn(1024, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    wide = x.float()
    host = torch.empty(1 << 22, dtype=torch.uint8)

    def give_back() -> None:
        kept.clear()
        torch.cuda.empty_cache()

    return {
        "nothing": lambda: None,
        "an event": lambda: torch.cuda.Event().record(),  # type: ignore[no-untyped-call]
        "the first stream of torch": lambda: kept.append(torch.cuda.Stream()),  # type: ignore[no-untyped-call]
        "memory of the allocator, new": lambda: kept.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda")),
        "memory given back": give_back,
        "pinned memory": lambda: kept.append(torch.empty(1 << 22, dtype=torch.uint8, pin_memory=True)),
        "host memory registered": lambda: torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel(), 0),  # type: ignore[no-untyped-call]
        "memory of ours": lambda: kept.append(driver.allocate(1 << 20, 1 << 20, 0)),
        "a kernel of ours loaded": lambda: driver.load_function(image(), "wait_for", 0, 0),
        "a kernel of torch, its first": lambda: kept.append(torch.special.bessel_j1(wide)),
        "the first sort": lambda: kept.append(torch.sort(wide)),
        "the first product of cuBLAS": lambda: kept.append(x @ y.t()),
        "a product of another kind": lambda: kept.append(wide @ wide.t()),
        "a product of another size": lambda: kept.append(x[:8] @ y[:200].t()),
        "pageable memory copied": lambda: kept.append(host.cuda()),
        "a result read": lambda: wide.sum().item(),
        "the stream waited for": lambda: torch.cuda.current_stream().synchronize(),
        "the device waited for": lambda: torch.cuda.synchronize(),
    }


def measure(
    name: str, call: Callable[[], object], function: ctypes.c_void_p, word: ctypes.c_uint32, apart: bool
) -> dict[str, Any]:
    """One call beside a kernel that waits."""
    torch.cuda.synchronize()
    word.value = 0
    address, limit = ctypes.c_uint64(ctypes.addressof(word)), ctypes.c_uint64(LIMIT_MS * 1_000_000)
    parameters = (ctypes.c_void_p * 2)(ctypes.addressof(address), ctypes.addressof(limit))
    launch = driver.LaunchConfig(grid=(1, 1, 1), block=(1, 1, 1), shared_bytes=0, num_attributes=0)
    launch.stream = torch.cuda.current_stream().cuda_stream
    copier = Copier(apart)
    copier.await_rounds(10)
    copier.longest_ms = 0.0
    code = driver.library().cuLaunchKernelEx(ctypes.byref(launch), function, parameters, None)
    driver.check("cuLaunchKernelEx", code)
    started = time.monotonic()
    copier.await_rounds(10)  # the kernel runs, and copies go on beside it
    before_ms = 1e3 * (time.monotonic() - started)
    started = time.monotonic()
    call()
    call_ms = 1e3 * (time.monotonic() - started)
    copier.await_rounds(2)
    word.value = 1
    torch.cuda.synchronize()
    copier.end()
    return {
        "call": name, "before_ms": round(before_ms, 2), "call_ms": round(call_ms, 2),
        "held_ms": round(copier.longest_ms, 2), "limit_ms": LIMIT_MS, "apart": apart,
        "loading": os.environ.get("CUDA_MODULE_LOADING", ""), "torch": torch.__version__,
    }  # fmt: skip


def main() -> None:
    """All calls."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--apart", action="store_true")
    options = parser.parse_args()
    torch.zeros(1, device="cuda")
    made = calls()
    function = driver.load_function(image(), "wait_for", 0, 0)
    word = ctypes.c_uint32.from_address(driver.allocate_mapped(_PAGE, 0))
    for name, call in made.items():
        line = json.dumps(measure(name, call, function, word, options.apart))
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        if options.out is not None:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
