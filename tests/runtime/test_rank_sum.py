"""The sum over ranks in the kernels' epilogue, on the CPU: rank order, bit by bit, for any number of ranks."""

from __future__ import annotations

import ctypes
import subprocess
from itertools import product
from pathlib import Path

import pytest

from mkcompile.runtime.sources import csrc_folder

#: In place of the generated header, whose instructions no CPU has.
WGMMA = "#pragma once\nnamespace mk {\ntemplate <int, class, bool>\nstruct Wgmma;\n}\n"


def built(folder: Path, csrc: Path) -> ctypes.CDLL:
    generated = folder / "stub" / "device" / "generated"
    generated.mkdir(parents=True)
    (generated / "wgmma.cuh").write_text(WGMMA)
    source = Path(__file__).with_name("rank_sum.cc")
    command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", f"-I{folder / 'stub'}", f"-I{csrc}", str(source)]
    subprocess.run([*command, "-o", str(folder / "rank_sum.so")], check=True)
    return ctypes.CDLL(str(folder / "rank_sum.so"))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return built(tmp_path_factory.mktemp("rank_sum"), csrc_folder())


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_partials_are_summed_in_rank_order(kernels: ctypes.CDLL, world: int) -> None:
    for rank, epoch, (group, index) in product(range(world), (4, 5), ((0, 0), (1, 3))):
        for tile in (0, 9):
            wrong = kernels.wrong_sums(world, rank, epoch, tile, group, index)
            assert wrong == 0, f"rank {rank}, epoch {epoch}, tile {tile}: {wrong} values"
