"""What the machine code of a kernel has to be, for tests that compile a few kernels and for the record of all.

No spills and no stack, but for kernels that record a timeline; no note of the assembler (serialised wgmma, ignored
setmaxnreg); at most the registers that a launch may take; the tensor core's instruction in the shape that was meant,
and nothing that touches its accumulators while it may still write them; one hand-over of registers by each side.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.nvrtc import Resources

MAX_REGISTERS = 168  # 65536 / 384 threads, what the launch may take
#: What kernels that record a timeline may spill: the words of a record are alive beside the accumulators. Reductions in
#: float16 with tiles of 128x256 spill 12 bytes, all-reduces over nodes 24.
TRACED_SPILL_BYTES = 24
INSTRUCTION_BYTES = 16
_LOCAL = re.compile(r"\b(LDL|STL)\b")
_REGISTER = re.compile(r"\bR\d+\b")
_PRODUCT = re.compile(r"HGMMA\.64x(\d+)x16\.F32\S* R(\d+),")


class NoDisassemblerError(Exception):
    """There is no nvdisasm on the path nor in the virtual environment."""


def disassembler() -> str:
    """nvdisasm of the toolkit, or of its wheel. Raises: NoDisassemblerError."""
    wheel = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin"
    found = shutil.which("nvdisasm", path=os.pathsep.join((os.environ.get("PATH", ""), str(wheel))))
    if found is None:
        raise NoDisassemblerError("nvdisasm not found: pip install nvidia-cuda-nvdisasm")
    return found


def text_of(image: bytes, function: str = "mk_kernel") -> bytes:
    """The instructions of one function of a cubin. Source: the ELF-64 header and its section table."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    count, names_idx = struct.unpack_from("<HH", image, 0x3C)
    sections = [struct.unpack_from("<IIQQQQ", image, table + 64 * i) for i in range(count)]
    names_at = sections[names_idx][4]
    for name, _, _, _, offset, size in sections:
        begin = names_at + name
        if image[begin : image.index(b"\0", begin)] == f".text.{function}".encode():
            return image[offset : offset + size]
    raise ValueError(f"no function {function} in this image")


def disassembled(texts: Sequence[bytes]) -> Iterator[list[str]]:
    """The instructions of each, without addresses: all by one call, most of which is its start.

    Raises: NoDisassemblerError.
    """
    command = [disassembler(), "--binary", "SM90a"]
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(texts))
        file.flush()
        listing = subprocess.run([*command, file.name], check=True, capture_output=True, text=True).stdout
    instructions = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", listing, re.MULTILINE)
    assert len(instructions) * INSTRUCTION_BYTES == sum(map(len, texts)), "a line of the listing was not understood"
    at = 0
    for text in texts:
        end = at + len(text) // INSTRUCTION_BYTES
        yield instructions[at:end]
        at = end


def count(code: Sequence[str], opcode: str) -> int:
    """How many instructions are of this opcode."""
    return len(re.findall(rf"\b{opcode}\b", "\n".join(code)))


def early_uses(code: Sequence[str]) -> list[str]:
    """What touches accumulators between a tile's last product and the wait for all products, which still write them."""
    found: list[str] = []
    since: list[str] = []
    registers: set[str] = set()
    for instruction in code:
        if product := _PRODUCT.search(instruction):
            registers = {f"R{int(product[2]) + i}" for i in range(int(product[1]) // 2)}
            since = []
        elif "WARPGROUP.DEPBAR.LE gsb0, 0x0" in instruction:
            found += [one for one in since if registers & set(_REGISTER.findall(one))]
            registers = set()
        elif registers:
            since.append(instruction)
    return found


def faults(config: KernelConfig, resources: Resources, code: Sequence[str]) -> list[str]:
    """Everything in which a kernel is not what it has to be."""
    text = "\n".join(code)
    spill_bytes = max(resources.spill_store_bytes, resources.stack_bytes)
    allowed_bytes = TRACED_SPILL_BYTES if config.trace else 0
    tensor_core = f"HGMMA.64x{config.group_n}x16.F32"
    # over nodes another kernel sends what is gathered
    sends = config.reduces and not (config.operator == "all_gather_gemm" and config.network != "none")
    gates = {
        f"notes of the assembler: {resources.notes}": not resources.notes,
        f"{resources.registers} registers": resources.registers <= MAX_REGISTERS,
        f"{spill_bytes} bytes spilled": spill_bytes <= allowed_bytes,
        "local memory": spill_bytes > 0 or not _LOCAL.search(text),
        f"no {tensor_core}": tensor_core in text,
        f"accumulators used early: {early_uses(code)}": not early_uses(code),
        f"{count(code, 'USETMAXREG')} hand-overs of registers": count(code, "USETMAXREG") == 2,
        "no loads of tiles by the copy engine": "UTMALDG.2D" in text,
        "results by the copy engine, or not": ("UTMASTG.3D" in text) == (not config.streams),
        "no fence for peers": not sends or "MEMBAR.ALL.SYS" in text,
        "what peers get by the copy engine, or not": ("UBLKCP" in text) == (sends and not config.streams),
    }
    return [what for what, holds in gates.items() if not holds]
