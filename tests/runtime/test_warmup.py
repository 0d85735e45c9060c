"""`mkcompile warmup`: which kernels it compiles, and what it says where there is no compiler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mkcompile.errors import CompileError, UnsupportedDeviceError
from mkcompile.runtime import warmup
from mkcompile.runtime.kernel_config import GATHER_TILES, HANDS_OVER, PING_PONG, STREAM_FORMS, TILES, all_configs


def test_it_compiles_what_the_launcher_asks_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert warmup.main(["--list", "--layout", "nk"]) == 0
    names = capsys.readouterr().out.split()
    panels = 3 * len(TILES) + len(GATHER_TILES)  # reduce-scatter, both ways of the all-reduce, gathers
    streams = 2 * (len(STREAM_FORMS) + len(HANDS_OVER) + len(PING_PONG))
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
