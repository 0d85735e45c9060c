"""Tiles that the kernels add to a residual: the bits of a sum that is stored and then added, each element once, and
nothing beside the residual. Virtual ranks on one GPU, and two GPUs where there are two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from mkcompile.runtime.kernel import PreparedLaunch
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.tile_schedule import TileSchedule

from .marks import ONE_AND_TWO_GPUS
from .ranks import TORCH_DTYPES, RankGroup, RankInput, nan_outputs, random_input
from .test_reductions import config_of, expected_of, group_of
from .truth import assert_bitwise, assert_close, summed

BOTH = pytest.mark.parametrize(
    ("operator", "broadcast"), [("gemm_reduce_scatter", "none"), ("gemm_all_reduce", "staged")], ids=["rs", "ar"]
)
_GUARD_ELEMENTS = 64 * 1024
_GUARD = 0x7FA5  # a NaN, whose bits any addition or store would change


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """A residual that lies between guards; `before` is what it was. Shapes: [rows, n]."""

    memory: torch.Tensor
    matrix: torch.Tensor
    before: torch.Tensor

    @staticmethod
    def random(shape: tuple[int, int], config: KernelConfig, device: int, seed: int, integers: bool) -> Residual:
        """Different on every rank. Integers are small enough that sums with them are exact."""
        elements = shape[0] * shape[1]
        memory = torch.full((elements + 2 * _GUARD_ELEMENTS,), _GUARD, dtype=torch.int16, device=f"cuda:{device}")
        generator = torch.Generator(device=memory.device).manual_seed(seed)
        matrix = memory[_GUARD_ELEMENTS : _GUARD_ELEMENTS + elements].view(TORCH_DTYPES[config.dtype]).view(shape)
        matrix.copy_(16 * torch.randn(shape, device=memory.device, generator=generator))
        if integers:
            matrix.round_()
        return Residual(memory=memory, matrix=matrix, before=matrix.clone())

    def check_guards(self, what: str) -> None:
        """Raises: AssertionError where anything beside the residual was written."""
        for name, guard in (("before", self.memory[:_GUARD_ELEMENTS]), ("behind", self.memory[-_GUARD_ELEMENTS:])):
            assert bool((guard == _GUARD).all()), f"{what}: {int((guard != _GUARD).sum())} elements written {name} it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """One sum on all ranks, stored into `outs` by one launch and added to `residuals` by the next."""

    exact: bool
    inputs: list[RankInput]
    outs: list[torch.Tensor]
    residuals: list[Residual]
    launches: tuple[list[PreparedLaunch], list[PreparedLaunch]]


def check(
    group: RankGroup, config: KernelConfig, m: int, n: int, k: int, *, epochs: int = 3, late: Sequence[int] = (),
    segments: int = 1, schedule: TileSchedule | None = None, scale: float = 1.0,
) -> None:  # fmt: skip
    """Back-to-back launches that store and that add, by turns; then all are checked."""
    rows = m // group.world if config.operator == "gemm_reduce_scatter" else m
    prepared = []
    for number in range(epochs):
        exact = number % 2 == 1
        inputs = [random_input(r, d, m, n, k, config, number, exact) for r, d in enumerate(group.devices)]
        outs = nan_outputs(group, rows, n, config)
        shape = rows, n
        residuals = [Residual.random(shape, config, d, 100 * number + r, exact) for r, d in enumerate(group.devices)]
        matrices = [one.matrix for one in residuals]
        stores = group.prepare(config, inputs, outs, schedule, segments, scale)
        adds = group.prepare(config, inputs, matrices, schedule, segments, scale, adds=True)
        launches = stores, adds
        prepared.append(Epoch(exact=exact, inputs=inputs, outs=outs, residuals=residuals, launches=launches))
    group.synchronize()
    for number, epoch in enumerate(prepared):
        for launches in epoch.launches:
            for rank in late:
                group.delay(rank, 2_000_000 * (1 + number % 2))
            group.run(launches)
    group.synchronize()
    group.check()
    for number, epoch in enumerate(prepared):
        _check_epoch(group, config, epoch, segments, scale, f"{config.name} W={group.world} {m}x{n}x{k} {number}")


def _check_epoch(group: RankGroup, config: KernelConfig, epoch: Epoch, segments: int, scale: float, what: str) -> None:
    home = f"cuda:{group.devices[0]}"
    truth, baseline = (scale * one for one in summed(epoch.inputs, config, home, group.local_world))
    for rank, (out, residual) in enumerate(zip(epoch.outs, epoch.residuals, strict=True)):
        name = f"{what} rank {rank}"
        residual.check_guards(name)
        assert_bitwise(residual.matrix, residual.before + out, f"{name}, added")
        before = residual.before.to(home).float()
        wanted, allowed = (expected_of(config, rank, group.world, one, segments) for one in (truth, baseline))
        if epoch.exact:
            assert_bitwise(residual.matrix.to(home), before + wanted, f"{name}, the sum of integers")
        else:
            rounded = (before + allowed.to(out.dtype).float()).to(out.dtype)
            assert_close(residual.matrix.to(home), before + wanted, rounded, name)


@BOTH
@pytest.mark.parametrize("world", [2, 4, 8])
def test_each_element_is_added_once(operator: str, broadcast: str, world: int) -> None:
    check(group_of((0,) * world), config_of(operator, broadcast), 2048, 1032, 520, epochs=4)


@BOTH
@pytest.mark.parametrize("m", [1, 17, 63, 65, 129, 1000])
def test_nothing_behind_the_last_row_is_written(operator: str, broadcast: str, m: int) -> None:
    group = group_of((0, 0))
    rows = m * group.world if operator == "gemm_reduce_scatter" else m
    for tile in ((64, 64), (128, 256)):
        check(group, config_of(operator, broadcast, tile), rows, 520, 264)


@BOTH
@pytest.mark.parametrize("world", [2, 4, 8])
def test_fewer_tiles_than_ranks(operator: str, broadcast: str, world: int) -> None:
    check(group_of((0,) * world), config_of(operator, broadcast), world, 8, 72, epochs=4)


@BOTH
@pytest.mark.parametrize("tile", [(64, 32), (64, 256), (128, 128), (128, 192)], ids=str)
def test_every_panel_of_a_tile(operator: str, broadcast: str, tile: tuple[int, int]) -> None:
    for dtype in ("bfloat16", "float16"):
        check(group_of((0, 0)), config_of(operator, broadcast, tile, dtype=dtype), 600, 776, 200)


@BOTH
def test_bias_and_average(operator: str, broadcast: str) -> None:
    config = config_of(operator, broadcast, has_bias=True, weight_layout="kn")
    check(group_of((0, 0)), config, 600, 776, 200, scale=0.5)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_rows_in_segments(world: int) -> None:
    config = config_of("gemm_reduce_scatter", "none", (128, 128))
    check(group_of((0,) * world), config, 3 * world * 200, 264, 136, segments=3)


@BOTH
def test_staging_ring_smaller_than_the_result(operator: str, broadcast: str) -> None:
    group = RankGroup((0, 0), arena_bytes=(1 << 20) + (2 << 20), max_tiles=16384, timeout_s=5.0)
    check(group, config_of(operator, broadcast, (64, 64)), 8192, 1024, 264)


@ONE_AND_TWO_GPUS
@BOTH
@pytest.mark.parametrize("late", [[], [0], [1]], ids=str)
def test_peers_that_come_late(operator: str, broadcast: str, late: list[int], devices: tuple[int, ...]) -> None:
    check(group_of(devices), config_of(operator, broadcast), 4096, 2048, 1024, epochs=4, late=late)


@BOTH
def test_two_ranks_may_differ(operator: str, broadcast: str) -> None:
    """One adds, the other stores: what a rank does with its own result is no matter of its peers."""
    group, config = group_of((0, 0)), config_of(operator, broadcast)
    rows = 512 if operator == "gemm_reduce_scatter" else 1024
    inputs = [random_input(rank, 0, 1024, 520, 264, config, 1, True) for rank in range(2)]
    outs = nan_outputs(group, rows, 520, config)
    residual = Residual.random((rows, 520), config, 0, 7, True)
    stores = group.prepare(config, inputs, outs)
    adds = group.prepare(config, inputs, [residual.matrix, outs[1]], adds=True)
    group.synchronize()
    group.run([adds[0], stores[1]])
    group.synchronize()
    group.check()
    truth, _ = summed(inputs, config, "cuda:0")
    first, second = (expected_of(config, rank, 2, truth) for rank in range(2))
    assert_bitwise(residual.matrix, residual.before.float() + first, "the rank that adds")
    assert_bitwise(outs[1], second, "the rank that stores")
    residual.check_guards("the rank that adds")


@BOTH
def test_a_graph_adds_at_each_replay(operator: str, broadcast: str) -> None:
    group, config, replays = group_of((0, 0)), config_of(operator, broadcast), 10
    rows = 256 if operator == "gemm_reduce_scatter" else 512
    inputs = [random_input(rank, 0, 512, 520, 264, config, 1, True) for rank in range(2)]
    residuals = [Residual.random((rows, 520), config, 0, rank, True) for rank in range(2)]
    launches = group.prepare(config, inputs, [one.matrix for one in residuals], adds=True)
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for rank, graph in enumerate(graphs):
        with torch.cuda.graph(graph, stream=group.streams[rank], capture_error_mode="thread_local"):
            launches[rank].run(torch.cuda.current_stream().cuda_stream)
    truth, _ = summed(inputs, config, "cuda:0")
    for _ in range(replays):
        for rank, graph in enumerate(graphs):
            with torch.cuda.stream(group.streams[rank]):
                graph.replay()
    group.synchronize()
    group.check()
    for rank, residual in enumerate(residuals):
        wanted, added = residual.before, expected_of(config, rank, 2, truth).to(residual.before.dtype)
        for _ in range(replays):
            wanted = wanted + added
        assert_bitwise(residual.matrix, wanted, f"rank {rank}")
        residual.check_guards(f"rank {rank}")


def test_sums_are_rounded_to_nearest_and_small_ones_kept() -> None:
    """Ties, subnormal numbers and sums that cancel, of both formats: as torch adds."""
    for dtype, tiny in (("bfloat16", 2.0**-133), ("float16", 2.0**-24)):
        config, group = config_of("gemm_all_reduce", "staged", dtype=dtype), group_of((0, 0))
        kind = TORCH_DTYPES[config.dtype]
        ulp = torch.finfo(kind).eps
        given = RankInput(
            x=torch.eye(128, 64, device="cuda:0", dtype=kind),
            w=torch.zeros(256, 64, device="cuda:0", dtype=kind),
            bias=None,
        )
        values = torch.tensor([ulp / 2, 3 * ulp / 2, -1.0, tiny, 3 * tiny, 256.0, -ulp / 4, 1 + ulp], device="cuda:0")
        given.w[:8] = values.to(kind)[:, None]
        nothing = RankInput(x=torch.zeros_like(given.x), w=given.w.clone(), bias=None)
        out = nan_outputs(group, 128, 256, config)
        starts = torch.tensor([1.0, 1 + ulp, tiny, -tiny, -1 - ulp, 0.0], device="cuda:0").to(kind)
        matrix = starts.repeat(128 * 256 // 6 + 1)[: 128 * 256].view(128, 256).contiguous()
        residuals = [matrix, matrix.clone()]
        stores = group.prepare(config, [given, nothing], out)
        adds = group.prepare(config, [given, nothing], residuals, adds=True)
        group.synchronize()
        group.run(stores)
        group.run(adds)
        group.synchronize()
        group.check()
        before = starts.repeat(128 * 256 // 6 + 1)[: 128 * 256].view(128, 256)
        for residual, stored in zip(residuals, out, strict=True):
            assert_bitwise(residual, before + stored, dtype)
