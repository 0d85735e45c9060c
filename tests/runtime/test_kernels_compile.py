"""Every kernel compiles for sm_90a to the machine code that was meant: no spills, tensor cores, register hand-over."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator

import pytest

from mkcompile.config import settings
from mkcompile.errors import CompileError, OperatorInputError, UnsupportedDeviceError
from mkcompile.runtime import abi, driver, nvrtc, sources
from mkcompile.runtime.gather_engine import engine_cubin
from mkcompile.runtime.kernel import OPTIONS, compile_kernel
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.offered import all_configs
from mkcompile.runtime.warmup import warm_up

from .. import machine_code
from ..gpu.broken_kernels import NO_ARRIVALS, NO_CARRIED, NO_CLEAR, NO_EXCHANGE, NO_MAIL, NO_WAIT, without
from ..kernel_record import inspected

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")

#: One of each kind; `make test-all` compiles all of them, which takes longer than all other tests together.
#: tests/machine_code.jsonl has what was found in those that were launched on GPUs (tests/test_kernel_record.py).
CONFIGS = [
    KernelConfig(),
    KernelConfig(block_m=64, block_n=32, weight_layout="kn", dtype="float16", has_bias=True, activation="gelu_erf"),
    KernelConfig(operator="gemm_reduce_scatter"),
    KernelConfig(operator="gemm_reduce_scatter", trace=True),
    KernelConfig(operator="gemm_reduce_scatter", block_n=224, weight_layout="kn"),
    KernelConfig(operator="gemm_all_reduce", broadcast="direct", block_n=128),
    KernelConfig(operator="gemm_all_reduce", broadcast="staged", dtype="float16", has_bias=True),
    KernelConfig(operator="gemm_all_reduce", broadcast="multicast"),
    KernelConfig(operator="all_gather_gemm"),
    KernelConfig(operator="all_gather_gemm", block_m=64, block_n=64, weight_layout="kn", has_bias=True),
    KernelConfig(operator="all_gather_gemm", block_m=64, block_n=64, streams=True, split=2),
    KernelConfig(operator="all_gather_gemm", block_n=160, pulls=True),
    KernelConfig(operator="all_gather_gemm", block_n=160, split=2),
    KernelConfig(operator="all_gather_gemm", returns=True),
    KernelConfig(streams=True, block_m=128, block_n=64, split=2, activation="silu"),
    KernelConfig(operator="gemm_all_reduce", streams=True, block_m=128, block_n=128),
    KernelConfig(operator="gemm_reduce_scatter", streams=True, block_m=64, block_n=64, split=4, has_bias=True),
    KernelConfig(streams=True, block_m=128, block_n=128, split=2, ping_pong=True),
    KernelConfig(streams=True, block_m=128, block_n=256),
    KernelConfig(operator="gemm_all_reduce", streams=True, block_m=128, block_n=128, hands_over=True),
    KernelConfig(operator="gemm_all_reduce", streams=True, block_n=128, split=2, ping_pong=True, shares_ends=True),
    KernelConfig(operator="gemm_reduce_scatter", streams=True, block_m=64, block_n=64, hands_over=True),
    KernelConfig(operator="gemm_reduce_scatter", network="flat"),
    KernelConfig(operator="gemm_all_reduce", broadcast="staged", network="flat", block_n=128),
    KernelConfig(operator="gemm_all_reduce", broadcast="staged", network="hierarchical", has_bias=True),
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache folder of these tests, for this process and those it starts: never the user's."""
    monkeypatch.setenv("MKCOMPILE_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "mkcompile-kernels"))
    settings.cache_clear()
    yield
    settings.cache_clear()


def instructions(image: bytes) -> list[str]:
    """Of the machine code; a skip where there is no disassembler."""
    try:
        (code,) = machine_code.disassembled([machine_code.text_of(image)])
    except machine_code.NoDisassemblerError as error:
        pytest.skip(str(error))
    return code


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_machine_code(config: KernelConfig) -> None:
    cubin = compile_kernel(config).cubin
    assert machine_code.faults(config, cubin.resources, instructions(cubin.image)) == []


def test_a_kernel_that_is_not_as_meant_is_found() -> None:
    config = KernelConfig(operator="gemm_reduce_scatter", block_m=64, block_n=64)
    cubin = compile_kernel(config).cubin
    code = instructions(cubin.image)
    other = dataclasses.replace(config, block_n=128, stages=0)
    assert machine_code.faults(other, cubin.resources, code) == ["no HGMMA.64x64x16.F32"]
    assert machine_code.faults(dataclasses.replace(config, streams=True, stages=0), cubin.resources, code) == [
        "results by the copy engine, or not", "what peers get by the copy engine, or not",
    ]  # fmt: skip
    spilled = dataclasses.replace(cubin.resources, spill_store_bytes=12, registers=169, notes=("C7512",))
    assert machine_code.faults(config, spilled, [one for one in code if "USETMAXREG" not in one]) == [
        "notes of the assembler: ('C7512',)", "169 registers", "12 bytes spilled", "0 hand-overs of registers",
    ]  # fmt: skip
    assert machine_code.faults(config, cubin.resources, [*code, "STL [R1], R2"]) == ["local memory"]
    traced = dataclasses.replace(config, trace=True)
    assert machine_code.faults(traced, dataclasses.replace(cubin.resources, spill_store_bytes=24), code) == []
    assert machine_code.faults(traced, dataclasses.replace(cubin.resources, spill_store_bytes=28), code) != []


def test_accumulators_that_are_used_early_are_noticed() -> None:
    product, wait = "HGMMA.64x8x16.F32.BF16 R24, gdesc[UR4], R24, gsb0", "WARPGROUP.DEPBAR.LE gsb0, 0x0"
    assert machine_code.early_uses([product, "MOV R30, R27", wait]) == ["MOV R30, R27"]
    assert machine_code.early_uses([product, wait, "MOV R30, R27"]) == []
    assert machine_code.early_uses([product, "MOV R30, R28", wait]) == []


@pytest.mark.slow
def test_all_configurations_are_as_meant() -> None:
    instructions(compile_kernel(CONFIGS[0]).cubin.image)  # or a skip
    kernels = list(warm_up(all_configs(), os.cpu_count() or 1))
    assert [(line.kernel, what) for line, what in inspected(kernels) if what] == []


def test_plain_sm_90_is_refused_by_the_assembler() -> None:
    options = [option.replace("sm_90a", "sm_90") for option in OPTIONS]
    config = KernelConfig(block_m=64, block_n=64)
    with pytest.raises(CompileError, match=r"wgmma|setmaxnreg"):
        nvrtc.compile_cubin("k", config.source(), sources.headers(), options)


def test_mirror_that_drifts_does_not_compile() -> None:
    source = KernelConfig(block_m=64, block_n=64).source() + abi.assertions()
    drifted = re.sub(r"(->pace_ns\) == )\d+", r"\g<1>9999", source)
    assert drifted != source
    with pytest.raises(CompileError, match="static assertion"):
        nvrtc.compile_cubin("k", drifted, sources.headers(), OPTIONS)


def test_planted_defects_still_fit_the_sources() -> None:
    headers = sources.headers()
    broken = without(headers, *NO_WAIT)
    assert [name for name in headers if headers[name] != broken[name]] == ["device/sync.cuh"]
    config = KernelConfig(operator="gemm_reduce_scatter", block_m=64, block_n=64)
    assert nvrtc.compile_cubin("broken", config.source(), broken, OPTIONS).resources.is_clean


@pytest.mark.parametrize("defect", [NO_MAIL, NO_CLEAR, NO_EXCHANGE], ids=["mail", "clear", "exchange"])
def test_planted_defects_still_fit_the_streaming_kernels(defect: tuple[str, str, str]) -> None:
    config = KernelConfig(operator="gemm_reduce_scatter", streams=True, block_m=64, block_n=32, split=2)
    broken = without(sources.headers(), *defect)
    assert nvrtc.compile_cubin("broken", config.source(), broken, OPTIONS).resources.is_clean


@pytest.mark.parametrize("defect", [NO_ARRIVALS, NO_CARRIED], ids=["arrivals", "carried"])
def test_planted_defects_still_fit_the_all_gather(defect: tuple[str, str, str]) -> None:
    assert without(sources.headers(), *defect) != sources.headers()


def test_kernels_round_the_copy_engine_fit_beside_a_full_sm() -> None:
    cubin = engine_cubin()
    assert [int(count) for count in re.findall(r"Used (\d+) registers", cubin.log)] and "C75" not in cubin.log
    assert all(int(count) <= 32 for count in re.findall(r"Used (\d+) registers", cubin.log))
    assert set(re.findall(r"(\d+) bytes spill stores", cubin.log)) == {"0"}


#: What the hooks of the timeline would be if there were none.
NO_TRACE = """
#pragma once
#include "abi/trace.h"
#include "device/sync.cuh"
namespace mk {
struct Trace {
  u32 start_ns = 0;
  MK_DEVICE Trace(const LaunchArguments&, u32, bool = true) {}
  MK_DEVICE u32 now() const { return 0; }
  MK_DEVICE void begin() {}
  MK_DEVICE void waited(u32, u32 = 0) {}
  MK_DEVICE void end(TraceRole, u32, u32) {}
  MK_DEVICE void end_wait(TraceRole, u32, u32) {}
};
MK_DEVICE void wait_phase(const LaunchArguments& args, u32 barrier, u32 parity, Role role, Trace&, u32 = 0) {
  wait_phase(args, barrier, parity, role);
}
}  // namespace mk
"""


def compiled(config: KernelConfig, headers: dict[str, str]) -> list[str]:
    return instructions(nvrtc.compile_cubin("k", config.source(), headers, OPTIONS).image)


@pytest.mark.parametrize(
    "config",
    [
        KernelConfig(block_m=64, block_n=64),
        KernelConfig(operator="gemm_reduce_scatter", block_m=64, block_n=32),
        KernelConfig(operator="all_gather_gemm", block_m=64, block_n=64),
    ],
    ids=lambda config: config.operator,
)
def test_hooks_leave_nothing_in_a_kernel_that_is_not_traced(config: KernelConfig) -> None:
    without_hooks = {**sources.headers(), "device/trace.cuh": NO_TRACE}
    plain = compiled(config, sources.headers())
    assert len(plain) > 500 and plain == compiled(config, without_hooks)
    if config.operator == "gemm":
        assert len(compiled(dataclasses.replace(config, trace=True), sources.headers())) > len(plain)


@pytest.mark.parametrize(("left_bytes", "fits"), [(16384, True), (16383, False)])
def test_a_block_without_room_for_one_image_does_not_compile(left_bytes: int, fits: bool) -> None:
    source = (
        '#include "device/gather_image.cuh"\n'
        "struct Full { static constexpr int kBytesA = 16384, kSharedBytes = 232448 - 1024 - 16 - LEFT; };\n"
        "template struct mk::ImageTile<Full>;\n"
        'extern "C" __global__ void k() {}\n'
    )
    source = "namespace mk { inline constexpr bool kTrace = false; }\n" + source.replace("LEFT", str(left_bytes))
    if fits:
        nvrtc.compile_cubin("k", source, sources.headers(), OPTIONS)
        return
    with pytest.raises(CompileError, match="at least one image"):
        nvrtc.compile_cubin("k", source, sources.headers(), OPTIONS)


def test_compile_error_carries_the_log() -> None:
    with pytest.raises(CompileError, match="undefined_thing"):
        nvrtc.compile_cubin("k", "int x = undefined_thing;", {}, OPTIONS)


def test_spills_and_notes_are_seen() -> None:
    log = (
        "ptxas info : Used 168 registers, used 1 barriers\n"
        "ptxas info : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"
        "    16 bytes stack frame, 12 bytes spill stores, 36 bytes spill loads"
    )
    resources = nvrtc.parse_resources(log)
    assert not resources.is_clean and resources.spill_load_bytes == 36 and len(resources.notes) == 1
    clean = dataclasses.replace(resources, notes=(), stack_bytes=0, spill_store_bytes=0, spill_load_bytes=0)
    assert clean.is_clean
    with pytest.raises(CompileError):
        nvrtc.parse_resources("")


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
def test_other_chips_are_refused_by_name(capability: tuple[int, int]) -> None:
    with pytest.raises(UnsupportedDeviceError, match=rf"{capability[0]}\.{capability[1]}"):
        driver.require_hopper(capability)
    driver.require_hopper((9, 0))


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_m": 96}, {"dtype": "float32"}, {"weight_layout": "other"}, {"stages": 9},
        {"operator": "gemm_all_reduce"}, {"broadcast": "direct"},
        {"operator": "gemm_reduce_scatter", "activation": "relu"},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_configurations_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(OperatorInputError):
        KernelConfig(**wrong)  # type: ignore[arg-type]
