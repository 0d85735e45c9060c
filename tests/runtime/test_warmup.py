"""`mkcompile warmup`: which kernels it compiles, and what it says where there is no compiler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mkcompile.errors import CompileError, UnsupportedDeviceError
from mkcompile.runtime import kernel_cache, nvrtc, sources, warmup
from mkcompile.runtime.kernel import OPTIONS, CompiledKernel, translation_unit
from mkcompile.runtime.kernel_cache import KernelCache, entry_key
from mkcompile.runtime.kernel_config import (
    GATHER_TILES,
    HANDS_OVER,
    PING_PONG,
    STREAM_FORMS,
    TILES,
    KernelConfig,
    all_configs,
)
from mkcompile.runtime.nvrtc import Cubin


def test_it_compiles_what_the_launcher_asks_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert warmup.main(["--list", "--layout", "nk"]) == 0
    names = capsys.readouterr().out.split()
    panels = 3 * len(TILES) + len(GATHER_TILES)  # reduce-scatter, both ways of the all-reduce, gathers
    streams = 3 * len(STREAM_FORMS) + 2 * (len(HANDS_OVER) + len(PING_PONG))  # gathers send no partials
    assert len(names) == 2 * (panels + streams), "with and without bias"
    assert all("bfloat16_nk" in name for name in names)
    assert warmup.main(["--list", "--all"]) == 0
    assert len(capsys.readouterr().out.split()) == len(all_configs())


@pytest.mark.parametrize(("error", "status"), [(UnsupportedDeviceError("no NVRTC"), 2), (CompileError("line 3"), 1)])
def test_a_failure_is_a_message_and_a_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, status: int
) -> None:
    def fail(*_: object) -> Iterator[None]:
        raise error
        yield

    monkeypatch.setattr(warmup, "warm_up", fail)
    assert warmup.main([]) == status
    assert str(error) in capsys.readouterr().err


def test_it_says_how_much_there_is_to_do_and_stops_when_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads, Used 168 registers"

    def interrupted(*_: object) -> Iterator[CompiledKernel]:
        for _i in range(10):
            yield CompiledKernel(config=KernelConfig(), cubin=Cubin(image=b"", log=log))
        raise KeyboardInterrupt

    monkeypatch.setattr(warmup, "warm_up", interrupted)
    assert warmup.main(["--jobs", "2"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(f"{len(warmup.launched_configs(['bfloat16'], ['nk', 'kn']))} kernels, 2 at once")
    assert said.count(", about") == 1 and "stopped; 10 of" in said
    assert warmup._left_text([0.0, *range(30, 330, 30)], 20) == ", about 5 min left"


def test_no_process_is_started_for_kernels_that_are_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    there, missing = KernelConfig(), KernelConfig(dtype="float16")
    cache, asked = KernelCache(tmp_path / "kernels"), []
    monkeypatch.setattr(nvrtc, "version", lambda: "13.0")
    monkeypatch.setattr(kernel_cache, "settings", lambda: type("Settings", (), {"cache_dir": tmp_path}))
    key = entry_key(translation_unit(there), sources.headers(), OPTIONS, "13.0")
    cache.store(key, Cubin(image=b"code", log=""))

    class Pool:
        def __init__(self, num_processes: int, mp_context: object) -> None:
            asked.append(num_processes)

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def map(self, function: object, configs: list[KernelConfig], chunksize: int) -> list[KernelConfig]:
            return configs

    monkeypatch.setattr(warmup, "ProcessPoolExecutor", Pool)
    (found,) = warmup.warm_up([there], 8)
    assert (found.config, found.cubin.image, asked) == (there, b"code", [])
    made: list[object] = list(warmup.warm_up([missing, there], 8))
    assert made[1] == missing and asked == [1]
