"""`mkcompile warmup`: which kernels it compiles, and what it says where there is no compiler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mkcompile.config import Settings
from mkcompile.errors import CompileError, UnsupportedDeviceError
from mkcompile.runtime import kernel_cache, network_choice, nvrtc, sources, warmup
from mkcompile.runtime.kernel import OPTIONS, CompiledKernel, translation_unit
from mkcompile.runtime.kernel_cache import KernelCache, entry_key
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.nvrtc import Cubin
from mkcompile.runtime.offered import all_configs, launched_configs


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert warmup.main(["--list", *arguments]) == 0
    return capsys.readouterr().out.split()


def test_it_compiles_what_the_launcher_asks_for(capsys: pytest.CaptureFixture[str]) -> None:
    names = listed(capsys, "--layout", "nk")
    assert names == [config.name for config in launched_configs(["bfloat16"], ["nk"])]
    assert all("bfloat16_nk" in name and "flat" not in name for name in names)
    assert len(listed(capsys, "--all")) == len(all_configs())


def test_kernels_over_nodes_are_compiled_where_a_network_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one_node = listed(capsys)
    flat = listed(capsys, "--network", "flat")
    assert flat and all("flat" in name for name in flat)
    both = sorted([*one_node, *flat, *listed(capsys, "--network", "hierarchical")])
    settings = Settings(network="rc:mlx5_0", trace=True)
    monkeypatch.setattr(network_choice, "settings", lambda: settings)
    assert sorted(listed(capsys)) == both
    monkeypatch.setattr(warmup, "settings", lambda: settings)
    assert sorted(listed(capsys)) == sorted(f"{name}_trace" for name in both)


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
    assert said.startswith(f"{len(launched_configs(['bfloat16'], ['nk', 'kn']))} kernels, 2 at once")
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

        def map(self, function: object, configs: list[KernelConfig], chunksize: int) -> list[CompiledKernel]:
            return [CompiledKernel(config=one, cubin=Cubin(image=one.name.encode(), log="")) for one in configs]

    monkeypatch.setattr(warmup, "ProcessPoolExecutor", Pool)
    (found,) = warmup.warm_up([there], 8)
    assert (found.config, found.cubin.image, asked) == (there, b"code", [])
    made = list(warmup.warm_up([missing, there], 8))
    assert made[1].config == missing and asked == [1]
    flat = KernelConfig(operator="all_gather_gemm", network="flat")
    both = [flat, replace(flat, network="hierarchical")]
    made = list(warmup.warm_up(both, 8))
    assert [one.config for one in made] == both and made[0].cubin == made[1].cubin and asked == [1, 1]
