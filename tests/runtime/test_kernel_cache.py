"""The folder of compiled kernels: shared, private, and never a reason to fail."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mkcompile.runtime.kernel_cache import KernelCache, entry_key
from mkcompile.runtime.nvrtc import Cubin

CUBIN = Cubin(image=b"\x7fELF" + bytes(range(256)) * 40, log="ptxas info : Used 168 registers")


def test_round_trip_and_modes(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "a" / "kernels")
    assert cache.load("k") is None
    cache.store("k", CUBIN)
    assert cache.load("k") == CUBIN
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in cache.folder.iterdir()] == [0o600]


def test_damaged_entry_is_not_loaded_and_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = KernelCache(tmp_path)
    cache.store("k", CUBIN)
    entry = next(tmp_path.iterdir())
    for damaged in (entry.read_bytes()[:-1], b"", entry.read_bytes().replace(b"ELF", b"elf")):
        entry.write_bytes(damaged)
        assert cache.load("k") is None
    assert "damaged" in caplog.text
    cache.store("k", CUBIN)
    assert cache.load("k") == CUBIN


def test_entry_that_others_can_write_is_not_loaded(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "kernels")
    cache.store("k", CUBIN)
    entry = next(cache.folder.iterdir())
    entry.chmod(0o622)
    assert cache.load("k") is None
    entry.chmod(0o600)
    cache.folder.chmod(0o777)
    assert cache.load("k") is None
    cache.folder.chmod(0o700)
    assert cache.load("k") == CUBIN


def test_entry_of_another_user_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KernelCache(tmp_path)
    cache.store("k", CUBIN)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    assert cache.load("k") is None


def test_link_is_not_followed(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    cache.store("k", CUBIN)
    entry = next(tmp_path.iterdir())
    entry.rename(tmp_path / "elsewhere")
    entry.symlink_to(tmp_path / "elsewhere")
    assert cache.load("k") is None


def test_folder_that_cannot_be_made_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        KernelCache(tmp_path / "file" / "kernels").store("k", CUBIN)
    assert "can't be written" in caplog.text


def test_many_writers_and_readers_see_whole_entries(tmp_path: Path) -> None:
    def work(i: int) -> bool:
        cache = KernelCache(tmp_path)
        cache.store("k", CUBIN)
        return cache.load("k") == CUBIN

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(64)))
    assert len(list(tmp_path.iterdir())) == 1


def test_key_changes_with_everything_that_matters() -> None:
    base = entry_key("source", {"a.cuh": "text"}, ["-O3"], "13.0")
    others = [
        entry_key("source2", {"a.cuh": "text"}, ["-O3"], "13.0"),
        entry_key("source", {"a.cuh": "text2"}, ["-O3"], "13.0"),
        entry_key("source", {"b.cuh": "text"}, ["-O3"], "13.0"),
        entry_key("source", {"a.cuh": "text"}, ["-O2"], "13.0"),
        entry_key("source", {"a.cuh": "text"}, ["-O3"], "13.1"),
        entry_key("source", {"a.cuh": "tex", "b": "t"}, ["-O3"], "13.0"),
    ]
    assert len({base, *others}) == 7
