"""`python -m tests.kernel_record [FOLDER]`: look at every kernel in a cache folder, and write down what it is made of.

Kernels are compiled where they are wanted (`python -m mkcompile warmup`, tests, benchmarks); this says of all of them
at once whether they are what they have to be (tests/machine_code.py), and keeps registers, spills and instructions in
tests/machine_code.jsonl, for the sources that they were compiled from. About two minutes of one core for 700 kernels.
Exit status 1 where one is not as it has to be: nothing is written then.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any, get_args

from mkcompile.config import settings
from mkcompile.errors import OperatorInputError
from mkcompile.runtime import kernel_config as known
from mkcompile.runtime import nvrtc, sources
from mkcompile.runtime.gather_engine import engine_cubin
from mkcompile.runtime.kernel import OPTIONS, CompiledKernel, translation_unit
from mkcompile.runtime.kernel_cache import KernelCache, entry_key
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.network_gather import mover_cubin
from mkcompile.runtime.nvrtc import Cubin
from tests import machine_code

RECORD = Path(__file__).with_name("machine_code.jsonl")
_AT_ONCE = 64  # a disassembler takes half a second to start


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One kernel. Units: bytes; registers a thread at launch; instructions of a kind."""

    kernel: str
    registers: int
    code_bytes: int
    spill_bytes: int = 0
    stack_bytes: int = 0
    hgmma: int = 0
    setmaxnreg: int = 0


def possible_configs() -> Iterator[KernelConfig]:
    """Every configuration that there can be with as many stages as fit, whoever would launch it."""
    kinds = list(product(get_args(known.DtypeName), get_args(known.WeightLayout), (False, True), (False, True)))
    for form, (dtype, layout, has_bias, trace) in product(_forms(), kinds):
        try:
            yield KernelConfig(dtype=dtype, weight_layout=layout, has_bias=has_bias, trace=trace, **form)
        except OperatorInputError:
            continue


def _forms() -> Iterator[dict[str, Any]]:
    activations, broadcasts, networks = (get_args(one) for one in (known.Activation, known.Broadcast, known.Network))
    for operator, activation in product(get_args(known.OperatorName), activations):
        base = {"operator": operator, "activation": activation}
        gathers: tuple[dict[str, Any], ...] = ({}, {"pulls": True}, {"returns": True}, {"split": 2})
        for (rows, columns), broadcast, network, way in product(known.TILES, broadcasts, networks, gathers):
            tile = {"block_m": rows, "block_n": columns}
            yield {**base, **tile, "broadcast": broadcast, "network": network, **way}
        ways: tuple[dict[str, bool], ...] = (
            {}, {"ping_pong": True}, {"hands_over": True}, {"ping_pong": True, "shares_ends": True},
        )  # fmt: skip
        for (rows, columns), split, way in product(known.STREAM_TILES, known.SPLITS, ways):
            yield {**base, "block_m": rows, "block_n": columns, "streams": True, "split": split, **way}


def kernels_in(folder: Path) -> list[CompiledKernel]:
    """The kernels of a cache folder that are of today's sources. Those of two names (gathers over nodes) count once.

    Raises: UnsupportedDeviceError where NVRTC, whose version is part of a name, is not installed.
    """
    cache, headers, compiler = KernelCache(folder), sources.headers(), nvrtc.version()
    left, found = {path.stem for path in folder.glob("*.cubin")}, []
    for config in possible_configs():
        key = entry_key(translation_unit(config), headers, OPTIONS, compiler)
        cubin = cache.load(key) if key in left else None
        if cubin is not None:
            left.remove(key)
            found.append(CompiledKernel(config=config, cubin=cubin))
    return sorted(found, key=lambda one: one.config.name)


def inspected(kernels: Sequence[CompiledKernel]) -> Iterator[tuple[Line, list[str]]]:
    """What each is made of, and in what it is not as it has to be. Raises: NoDisassemblerError."""
    for begin in range(0, len(kernels), _AT_ONCE):
        some = kernels[begin : begin + _AT_ONCE]
        texts = [machine_code.text_of(one.cubin.image) for one in some]
        for one, text, code in zip(some, texts, machine_code.disassembled(texts), strict=True):
            resources = one.cubin.resources
            yield (
                Line(
                    kernel=one.config.name,
                    registers=resources.registers,
                    spill_bytes=resources.spill_store_bytes,
                    stack_bytes=resources.stack_bytes,
                    hgmma=machine_code.count(code, "HGMMA"),
                    setmaxnreg=machine_code.count(code, "USETMAXREG"),
                    code_bytes=len(text),
                ),
                machine_code.faults(one.config, resources, code),
            )


def helpers(cubin: Cubin) -> Iterator[Line]:
    """The functions of a unit that is no operator's: round the copy engine, and over nodes."""
    for function, report in re.findall(r"entry function '(\w+)'(.*?)(?=Compiling|\Z)", cubin.log, re.DOTALL):
        resources = nvrtc.parse_resources(report)
        yield Line(
            kernel=function,
            registers=resources.registers,
            spill_bytes=resources.spill_store_bytes,
            stack_bytes=resources.stack_bytes,
            code_bytes=len(machine_code.text_of(cubin.image, function)),
        )


def write(lines: Sequence[Line], num_others: int) -> None:
    """The record, a line a kernel behind one that says of which sources; what is not said is 0."""
    header = {
        "csrc": sources.digest(),
        "compiler": nvrtc.version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "kernels": len(lines) - num_others,
        "helpers": num_others,
        "stale_reason": "",
    }
    said = [{name: value for name, value in asdict(line).items() if value} for line in lines]
    texts = [json.dumps(header), *(json.dumps(one, separators=(",", ":")) for one in said)]
    RECORD.write_text("\n".join(texts) + "\n")


def read() -> tuple[dict[str, Any], list[Line]]:
    """What the record says of itself, and its lines."""
    header, *lines = (json.loads(text) for text in RECORD.read_text().splitlines())
    return header, [Line(**line) for line in lines]


def main(arguments: Sequence[str]) -> int:
    """0 where all are as they have to be, and are written down."""
    folder = Path(arguments[0]) if arguments else settings().cache_dir / "kernels"
    kernels = kernels_in(folder)
    if not kernels:
        sys.stdout.write(f"no kernel of these sources ({sources.digest()}) in {folder}\n")
        return 1
    found = list(inspected(kernels))
    small = [line for cubin in (engine_cubin(), mover_cubin()) for line in helpers(cubin)]
    bad = [f"{line.kernel}: {', '.join(what)}\n" for line, what in found if what]
    bad += [f"{line.kernel}: spills\n" for line in small if line.spill_bytes or line.stack_bytes]
    sys.stdout.writelines(bad)
    sys.stdout.write(f"{len(found)} kernels and {len(small)} helpers of {sources.digest()}, {len(bad)} not as meant\n")
    if not bad:
        write([*(line for line, _ in found), *small], len(small))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
