"""The text that the device compiler sees: the project's headers, one generated header, and a translation unit."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from mkcompile.errors import CompileError

#: Columns that one wgmma instruction computes, for the tiles of `KernelConfig`.
WGMMA_COLUMNS = (16, 32, 64, 128, 160, 192, 224, 256)
_WGMMA_TYPES = (("Bf16", "bf16"), ("Fp16", "f16"))


def csrc_folder() -> Path:
    """The folder of the device sources, in a checkout or in an installed package.

    Raises: CompileError where neither has it.
    """
    here = Path(__file__).resolve()
    for folder in (here.parents[1] / "csrc", here.parents[2] / "csrc"):
        if (folder / "device" / "block.cuh").is_file():
            return folder
    raise CompileError(f"device sources not found beside {here.parents[1]}; reinstall mkcompile")


def _wgmma(columns: int, element: str, ptx_type: str, transposed: int) -> str:
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(acc[{i}])' for i in range(count))
    return (
        f"template <>\nstruct Wgmma<{columns}, {element}, {'true' if transposed else 'false'}> {{\n"
        f"  static MK_DEVICE void multiply(float (&acc)[{count}], u64 a, u64 b, u32 adds = 1) {{\n"
        f'    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"\n'
        f'                 "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{ptx_type}.{ptx_type} "\n'
        f'                 "{{{registers}}}, %{count}, %{count + 1}, p, 1, 1, 0, {transposed};\\n}}"\n'
        f'                 : {outputs} : "l"(a), "l"(b), "r"(adds));\n  }}\n}};\n'
    )


@cache
def wgmma_header() -> str:
    """`Wgmma<columns, element, transposed>::multiply`: acc += A * B, 64 rows, both operands in shared memory.

    Without `adds` it is acc = A * B, whatever acc was.
    """
    parts = [
        '#pragma once\n// Generated: an asm statement must name each accumulator.\n#include "device/element.cuh"\n'
        "namespace mk {\ntemplate <int kColumns, class Element, bool kTransposed>\nstruct Wgmma;\n"
    ]
    for columns in WGMMA_COLUMNS:
        for element, ptx_type in _WGMMA_TYPES:
            parts += [_wgmma(columns, element, ptx_type, transposed) for transposed in (0, 1)]
    return "".join(parts) + "}  // namespace mk\n"


@cache
def headers() -> dict[str, str]:
    """Every header by the name that `#include` resolves to, relative to csrc/."""
    folder = csrc_folder()
    found = {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8")
        for room in ("abi", "device")
        for path in sorted((folder / room).rglob("*"))
        if path.suffix in (".h", ".cuh")
    }
    found["device/generated/wgmma.cuh"] = wgmma_header()
    return found


@cache
def digest() -> str:
    """A name for all of them: what was measured with other kernels does not hold for these."""
    text = "".join(f"{name}\0{header}\0" for name, header in sorted(headers().items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
