"""The way in which kernels announce a tile to a peer, and the proof that the test would see a wrong one."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import pytest
import torch

from mkcompile.runtime import driver, nvrtc, sources
from mkcompile.runtime.kernel import OPTIONS

_BLOCKS = 8
_THREADS = 256
_TILE_BYTES = 32768
_MESSAGES = 1000


@cache
def _image() -> bytes:
    source = (Path(__file__).parent / "ordering_litmus.cu").read_text()
    return nvrtc.compile_cubin("ordering_litmus", source, sources.headers(), OPTIONS).image


@cache
def _function(name: str, device: int) -> ctypes.c_void_p:
    return driver.load_function(_image(), name, 0, device)


def _start(
    name: str, device: int, stream: torch.cuda.Stream, *arguments: ctypes._SimpleCData, blocks: int = _BLOCKS
) -> None:
    pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
    with torch.cuda.device(device):
        code = driver.library().cuLaunchKernel(
            _function(name, device),
            blocks,
            1,
            1,
            _THREADS,
            1,
            1,
            0,
            ctypes.c_void_p(stream.cuda_stream),
            pointers,
            None,
        )
    driver.check(name, code)


def _pointer(tensor: torch.Tensor) -> ctypes.c_uint64:
    return ctypes.c_uint64(tensor.data_ptr())


def wrong_words(writer: str, busy_link: bool) -> int:
    """Words that the reader on GPU 1 saw too early, of all messages."""
    for device in (0, 1):
        driver.enable_peer_access(device, 1 - device)
    names = [(writer, 0), ("read_tiles", 1), ("load_link", 0)]
    for name, device in names:
        _function(name, device)
    tiles = torch.zeros(_BLOCKS * _TILE_BYTES, dtype=torch.uint8, device="cuda:1")
    flags = torch.zeros(_BLOCKS, dtype=torch.int32, device="cuda:1")
    acknowledged = torch.zeros(_BLOCKS, dtype=torch.int32, device="cuda:0")
    wrong = torch.zeros(2, dtype=torch.int32, device="cuda:1")
    source = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda:0")
    target = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda:1")
    streams = [torch.cuda.Stream(device=0), torch.cuda.Stream(device=1), torch.cuda.Stream(device=0)]
    for device in (0, 1):
        torch.cuda.synchronize(device)
    count = ctypes.c_uint32(_MESSAGES)
    _start(
        "read_tiles", 1, streams[1], _pointer(tiles), _pointer(flags), _pointer(acknowledged), count, _pointer(wrong)
    )
    _start(writer, 0, streams[0], _pointer(tiles), _pointer(flags), _pointer(acknowledged), count)
    if busy_link:
        bytes_, passes = ctypes.c_uint64(source.numel()), ctypes.c_uint32(60)
        _start("load_link", 0, streams[2], _pointer(source), _pointer(target), bytes_, passes, blocks=32)
    for device in (0, 1):
        torch.cuda.synchronize(device)
    words, missing = wrong.tolist()
    assert missing == 0, "a message never came"
    return int(words)


@pytest.mark.gpu2
@pytest.mark.parametrize("busy_link", [False, True], ids=["idle", "busy"])
def test_flag_never_overtakes_its_tile(busy_link: bool) -> None:
    assert wrong_words("write_ordered", busy_link) == 0


@pytest.mark.gpu2
def test_unordered_flag_is_seen_to_overtake() -> None:
    assert wrong_words("write_unordered", False) + wrong_words("write_unordered", True) > 0
