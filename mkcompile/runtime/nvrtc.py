"""NVRTC: source text to a cubin for one architecture. Needs no driver and no GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mkcompile.errors import CompileError, UnsupportedDeviceError

_MISSING = "fused kernels need NVRTC: pip install 'cuda-bindings>=13,<14' 'nvidia-cuda-nvrtc>=13,<14'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What ptxas reported of one kernel. Units: bytes, registers a thread at launch."""

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    notes: tuple[str, ...]

    @property
    def is_clean(self) -> bool:
        """No spills, no stack, and no note of serialised wgmma or ignored setmaxnreg (C75xx)."""
        return not (self.spill_store_bytes or self.spill_load_bytes or self.stack_bytes or self.notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cubin:
    """Machine code and how it was made."""

    image: bytes
    log: str

    @property
    def resources(self) -> Resources:
        """Parsed from the log."""
        return parse_resources(self.log)


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise UnsupportedDeviceError(f"{_MISSING} ({error})") from error
    return nvrtc


def _check(nvrtc: Any, result: tuple[Any, ...]) -> Any:
    code, *values = result
    if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC: {code}")
    return values[0] if len(values) == 1 else tuple(values)


def version() -> str:
    """Version of NVRTC, `major.minor`.

    Raises: UnsupportedDeviceError where NVRTC, or its Python binding, is not installed.
    """
    nvrtc = _nvrtc()
    try:
        found = nvrtc.nvrtcVersion()
    except RuntimeError as error:  # the binding looks for the library at its first call
        raise UnsupportedDeviceError(f"{_MISSING} ({error})") from error
    major, minor = _check(nvrtc, found)
    return f"{major}.{minor}"


def compile_cubin(name: str, source: str, headers: Mapping[str, str], options: Sequence[str]) -> Cubin:
    """Compile one translation unit.

    Raises: CompileError with the compiler's log; UnsupportedDeviceError where NVRTC is not installed.
    """
    nvrtc = _nvrtc()
    texts = [text.encode() for text in headers.values()]
    names = [header.encode() for header in headers]
    program = _check(nvrtc, nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), len(texts), texts, names))
    try:
        (code,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = _text(nvrtc, program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode(errors="replace")
        log = log.replace("\0", "").strip()
        if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{name} did not compile ({code}):\n{log}")
        image = _text(nvrtc, program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Cubin(image=image, log=log)


def _text(nvrtc: Any, program: Any, get_size: Any, get: Any) -> bytes:
    buffer = bytes(_check(nvrtc, get_size(program)))
    (code,) = get(program, buffer)
    if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC: {code}")
    return buffer


def parse_resources(log: str) -> Resources:
    """Registers, spills and notes from the log of a unit with one kernel, compiled with `--ptxas-options=-v`.

    Raises: CompileError where the log has no such report.
    """
    registers = re.search(r"Used (\d+) registers", log)
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if registers is None or frame is None:
        raise CompileError(f"no resource report in the compiler's log:\n{log}")
    return Resources(
        registers=int(registers[1]),
        stack_bytes=int(frame[1]),
        spill_store_bytes=int(frame[2]),
        spill_load_bytes=int(frame[3]),
        notes=tuple(line.strip() for line in log.splitlines() if re.search(r"\bC75\d\d\b", line)),
    )
