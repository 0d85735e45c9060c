"""All-gather + GEMM with virtual ranks on one GPU, and with two GPUs where there are two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from mkcompile.runtime.gather_abi import APART, TOGETHER
from mkcompile.runtime.gather_launch import GatherLaunch, GatherSchedule, GatherSize, PreparedGather
from mkcompile.runtime.gather_schedule import gather_order, push_choice
from mkcompile.runtime.kernel import compile_kernel, load_kernel
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.tensor_map import Matrix

from .ranks import TORCH_DTYPES, RankGroup, RankInput, nan_outputs, random_input
from .truth import assert_bitwise, assert_close, summed

ROWS = (1, 2, 16, 17, 63, 64, 65, 127, 128, 129, 255, 1000, 2048, 4097)
WORLDS = pytest.mark.parametrize("world", [2, 4, 8])


@cache
def group_of(devices: tuple[int, ...]) -> RankGroup:
    """One group for all tests on the same devices: they share its workspaces, as operators of a model do."""
    return RankGroup(devices, arena_bytes=160 << 20)


def config_of(tile: tuple[int, int] = (128, 256), **others: Any) -> KernelConfig:
    """A configuration."""
    return KernelConfig(operator="all_gather_gemm", block_m=tile[0], block_n=tile[1], **others)


@dataclass(slots=True, kw_only=True)
class Call:
    """One call on all ranks: shards, weights, biases and NaN where results will be."""

    size: GatherSize
    config: KernelConfig
    shards: list[Tensor]
    weights: list[list[Tensor]]  # [rank][product]
    biases: list[list[Tensor | None]]
    outs: list[list[Tensor]]
    gathered: list[Tensor]
    launches: list[PreparedGather]

    @staticmethod
    def make(
        group: RankGroup, config: KernelConfig, size: GatherSize, seed: int, integers: bool, returned: bool,
        schedule: GatherSchedule | None = None,
    ) -> Call:  # fmt: skip
        """Different numbers on every rank and for every seed."""
        plan = schedule or push_choice(config, size, group.max_grid(), 4, returned).schedule
        shards, weights, biases, outs, gathered, launches = [], [], [], [], [], []
        for rank, device in enumerate(group.devices):
            draws = [
                random_input(rank, device, size.shard_rows, n, size.inner, config, 10 * seed + i, integers)
                for i, n in enumerate(size.n)
            ]
            first = random_input(rank, device, size.shard_rows, 8, size.k, config, 10 * seed + 9, integers)
            shards.append(first.x)
            weights.append([draw.w for draw in draws])
            biases.append([draw.bias if i % 2 == 0 else None for i, draw in enumerate(draws)])
            outs.append([nan_outputs(group, size.rows, n, config)[rank] for n in size.n])
            gathered.append(nan_outputs(group, size.rows, size.inner, config)[rank])
            arguments = GatherLaunch(
                shard=Matrix.of(shards[-1]) if size.shard_rows > 1 else Matrix(first.x.data_ptr(), 1, size.k, size.k),
                weights=tuple(Matrix.of(w) for w in weights[-1]),
                outs=tuple(Matrix.of(out) for out in outs[-1]),
                biases=tuple(0 if b is None else b.data_ptr() for b in biases[-1]),
                size=size, schedule=plan, peers=group.peers(rank),
                result=gathered[-1].data_ptr() if returned else 0,
            )  # fmt: skip
            launches.append(PreparedGather(load_kernel(compile_kernel(config), device), arguments))
        return Call(
            size=size, config=config, shards=shards, weights=weights, biases=biases, outs=outs,
            gathered=gathered if returned else [], launches=launches,
        )  # fmt: skip

    def whole(self, device: str) -> Tensor:
        """The gathered matrix."""
        size = self.size
        parts = [shard.to(device) for shard in self.shards]
        if size.columns:
            return torch.cat(parts, 1)
        stacked = torch.stack([part.view(size.segments, size.segment_rows, size.k) for part in parts], 1)
        return stacked.reshape(size.rows, size.k)

    def check(self, exact: bool, what: str) -> None:
        """Close per tile, or exact; the gathered tensor bitwise."""
        home = self.shards[0].device
        whole = self.whole(str(home))
        for rank, outs in enumerate(self.outs):
            for i, out in enumerate(outs):
                weight, bias = self.weights[rank][i], self.biases[rank][i]
                given = RankInput(x=whole, w=weight, bias=bias)
                truth, baseline = summed([given], self.config, str(home))
                text = f"{what} {self.config.name} {self.size} rank {rank} product {i}"
                if exact:
                    assert_bitwise(out.to(home), truth, text)
                else:
                    assert_close(out.to(home), truth, baseline, text)
            if self.gathered:
                got = self.gathered[rank].to(home)
                assert torch.equal(got.view(torch.int16), whole.view(torch.int16)), f"{what}: gathered of rank {rank}"


def run(
    group: RankGroup, config: KernelConfig, size: GatherSize, *, epochs: int = 3, late: Sequence[int] = (),
    returned: bool = False, schedule: GatherSchedule | None = None,
) -> None:  # fmt: skip
    """Back-to-back launches with different inputs, then all checked."""
    calls = [Call.make(group, config, size, epoch, epoch % 2 == 1, returned, schedule) for epoch in range(epochs)]
    group.synchronize()
    for epoch, call in enumerate(calls):
        for rank in late:
            group.delay(rank, 2_000_000 * (1 + epoch % 2))
        for rank in range(group.world):
            with torch.cuda.device(group.devices[rank]):
                call.launches[rank].run(group.streams[rank].cuda_stream)
    group.synchronize()
    group.check()
    for epoch, call in enumerate(calls):
        call.check(epoch % 2 == 1, f"W={group.world} epoch {epoch}")


def rows_of(rows: int, world: int, n: tuple[int, ...] = (1032,), k: int = 520, **others: Any) -> GatherSize:
    """Sizes of one all-gather of rows."""
    return GatherSize(segment_rows=rows, k=k, n=n, world=world, **others)


@WORLDS
@pytest.mark.parametrize("returned", [False, True], ids=["", "returned"])
def test_products_of_all_shards(world: int, returned: bool) -> None:
    run(group_of((0,) * world), config_of(), rows_of(1024, world), returned=returned)


@pytest.mark.parametrize("rows", ROWS)
def test_any_number_of_rows(rows: int) -> None:
    for tile in ((64, 64), (128, 256)) if rows < 1000 else ((128, 256),):
        run(group_of((0, 0)), config_of(tile), rows_of(rows, 2, (520,), 264), returned=rows % 2 == 1)


@pytest.mark.parametrize("rows", [1, 17, 64, 200])
@WORLDS
def test_few_rows_in_either_order(rows: int, world: int) -> None:
    group, config, size = group_of((0,) * world), config_of((64, 64)), rows_of(rows, world, (520,), 264)
    for order in (APART, TOGETHER):
        plan = push_choice(config, size, group.max_grid(), 4, True).schedule
        run(group, config, size, returned=True, schedule=replace(plan, order=order, join=plan.positions(config, size)))


@pytest.mark.parametrize("tile", [(64, 128), (64, 256), (128, 128), (128, 160), (128, 192), (128, 224)], ids=str)
def test_every_tile(tile: tuple[int, int]) -> None:
    for layout in ("nk", "kn"):
        for dtype in TORCH_DTYPES:
            config = config_of(tile, weight_layout=layout, dtype=dtype)
            run(group_of((0, 0)), config, rows_of(600, 2, (776,), 200), epochs=2)


@WORLDS
def test_several_weights_with_and_without_bias(world: int) -> None:
    size = rows_of(300, world, (520, 8, 264, 1032), 328)
    for layout in ("nk", "kn"):
        run(group_of((0,) * world), config_of((128, 128), has_bias=True, weight_layout=layout), size, returned=True)


@WORLDS
def test_rows_in_segments(world: int) -> None:
    for rows in (200, 256, 7):
        run(group_of((0,) * world), config_of((128, 128)), rows_of(rows, world, segments=3), returned=True)


@WORLDS
@pytest.mark.parametrize("rows", [5, 300])
def test_columns(world: int, rows: int) -> None:
    size = GatherSize(segment_rows=rows, k=192, n=(264, 520), world=world, columns=True)
    for layout in ("nk", "kn"):
        run(group_of((0,) * world), config_of((128, 128), weight_layout=layout), size, returned=True)


@pytest.mark.parametrize("late", [0, 1])
def test_load_waits_when_a_peer_is_late(late: int) -> None:
    run(group_of((0, 0)), config_of(), rows_of(1536, 2), epochs=5, late=[late], returned=True)


def test_blocks_that_pushed_compute_too() -> None:
    group, config, size = group_of((0, 0)), config_of((64, 64)), rows_of(512, 2)
    assert gather_order(size) == APART
    for join in (0, 7, 100):
        plan = GatherSchedule(grid=24, blocks=8, group_rows=128, join=join)
        run(group, config, size, returned=True, schedule=plan)


@pytest.mark.gpu2
@pytest.mark.parametrize("late", [[], [0], [1]], ids=str)
def test_two_gpus(late: list[int]) -> None:
    group = group_of((0, 1))
    run(group, config_of(), rows_of(2048, 2, (2048,), 1024), epochs=5, late=late, returned=True)
    run(group, config_of((128, 128)), rows_of(999, 2, (1032,), 328), epochs=5, late=late)
