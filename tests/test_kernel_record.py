"""The record of all kernels is of today's sources, or says why not; and every kernel in it is as it has to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from mkcompile.runtime import nvrtc, sources
from mkcompile.runtime.kernel import OPTIONS, translation_unit
from mkcompile.runtime.kernel_cache import KernelCache, entry_key
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.nvrtc import Cubin
from mkcompile.runtime.offered import all_configs, launched_configs
from tests import kernel_record
from tests.kernel_record import Line, possible_configs, read
from tests.machine_code import MAX_REGISTERS, TRACED_SPILL_BYTES

HELPERS = {"mk_arrivals", "mk_audit", "mk_gate", "mk_mover", "mk_open"}


def test_the_record_is_of_these_sources_or_says_why_not() -> None:
    header, _ = read()
    assert header["csrc"] == sources.digest() or header["stale_reason"], (
        "the kernels changed since they were looked at: compile them (python -m mkcompile warmup), then "
        "python -m tests.kernel_record, or write a stale_reason into tests/machine_code.jsonl"
    )


def test_the_record_has_every_kernel_that_is_compiled_ahead() -> None:
    header, lines = read()
    names = [line.kernel for line in lines]
    assert len(names) == len(set(names)) == header["kernels"] + header["helpers"]
    if header["csrc"] == sources.digest():
        assert {one.name for one in launched_configs(["bfloat16"], ["nk", "kn"])} <= set(names)


def test_every_kernel_of_the_record_is_as_it_has_to_be() -> None:
    _, lines = read()
    assert [line for line in lines if line.registers > MAX_REGISTERS] == []
    spilled = {line.kernel: line.spill_bytes for line in lines if line.spill_bytes or line.stack_bytes}
    assert all(name.endswith("_trace") and spill <= TRACED_SPILL_BYTES for name, spill in spilled.items()), spilled
    operators = [line for line in lines if line.kernel not in HELPERS]
    assert len(operators) == len(lines) - len(HELPERS)
    assert [line for line in operators if not line.hgmma or line.setmaxnreg != 2] == []


def test_every_kernel_that_exists_is_recognised_in_a_cache() -> None:
    possible = {config.name for config in possible_configs()}
    assert {config.name for config in all_configs()} <= possible


def test_only_kernels_of_these_sources_are_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvrtc, "version", lambda: "13.0")
    config = KernelConfig(block_m=64, block_n=64)
    cache, old = KernelCache(tmp_path), {**sources.headers(), "device/tile.cuh": "// as it was"}
    for headers in (sources.headers(), old):
        cache.store(entry_key(translation_unit(config), headers, OPTIONS, "13.0"), Cubin(image=b"code", log=""))
    monkeypatch.setattr(kernel_record, "possible_configs", lambda: [config, KernelConfig()])
    assert [one.config for one in kernel_record.kernels_in(tmp_path)] == [config]


def test_what_is_written_is_what_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvrtc, "version", lambda: "13.0")
    monkeypatch.setattr(kernel_record, "RECORD", tmp_path / "record.jsonl")
    lines = [
        Line(kernel="a", registers=168, code_bytes=16, spill_bytes=12, stack_bytes=16, hgmma=4, setmaxnreg=2),
        Line(kernel="mk_gate", registers=24, code_bytes=32),
    ]
    kernel_record.write(lines, num_others=1)
    header, found = read()
    assert found == lines and header["csrc"] == sources.digest() and (header["kernels"], header["helpers"]) == (1, 1)
