"""All-gather calls on a machine without GPUs: what is launched, copied and refused."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mkcompile.config import read_settings
from mkcompile.errors import OperatorInputError, PeerGaveUpError, WorkspaceError
from mkcompile.ops.all_gather_gemm import AllGatherGemm
from mkcompile.ops.registry import arguments
from mkcompile.runtime import abi, gather_schedule, tactics
from mkcompile.runtime.gather_abi import APART, BLOCKS_PUSH, COLUMNS, ENGINE_COPIES, PEERS_READ, TOGETHER
from mkcompile.runtime.gather_engine import EnginePlaces, transfers
from mkcompile.runtime.gather_form import GatherForm, gather_form_of
from mkcompile.runtime.gather_launch import GatherLaunch, GatherSchedule, GatherSize, PreparedGather
from mkcompile.runtime.gather_operation import ByLibrary, GatherTensors
from mkcompile.runtime.gather_schedule import choose_gather, engine_choice, stream_choice
from mkcompile.runtime.kernel import LoadedKernel, PeerTable
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.launcher import Launcher
from mkcompile.runtime.machine import own_basis
from mkcompile.runtime.stream_schedule import StreamForm
from mkcompile.runtime.tactics import Planned
from mkcompile.runtime.tensor_map import Matrix
from mkcompile.runtime.workspace_layout import WorkspaceLayout

from .fakes import FakeDriver, FakePlatform

GROUP = "0"
CONFIG = KernelConfig(operator="all_gather_gemm")


def tensor(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def gather(*shape: int, dim: int = 0, n: tuple[int, ...] = (512,), **changes: Any) -> AllGatherGemm:
    inner = shape[-1] * (2 if dim == len(shape) - 1 else 1)
    weights = [tensor(one, inner).t() for one in n]
    call = AllGatherGemm(tensor(*shape), weights, [None] * len(n), [0] * len(n), dim, False, 2, GROUP, "key")
    return replace(call, **changes)


def test_results_are_the_products_and_the_gathered_tensor(launcher: Launcher, fake_driver: FakeDriver) -> None:
    outs = launcher(gather(3, 40, 64, dim=1, n=(512, 8), return_gathered=True))
    assert outs is not None and [tuple(out.shape) for out in outs] == [(240, 512), (240, 8), (3, 80, 64)]
    (block,) = fake_driver.launches
    assert (block.m, block.k[0], block.segments, block.segment_rows, block.world) == (240, 64, 3, 40, 2)


def test_products_that_no_kernel_makes_follow_one_that_gathers(launcher: Launcher, fake_driver: FakeDriver) -> None:
    mixed = gather(128, 64, n=(512,), forms=[1, 0], w=[tensor(256, 48), tensor(64, 512)], bias=[None, None])
    outs = launcher(mixed)
    assert outs is not None and [tuple(out.shape) for out in outs] == [(64, 48), (256, 512)]
    (block,) = fake_driver.launches
    assert (block.m, block.k[0], block.world) == (256, 64, 2)
    short = launcher.shortcut_like(mixed)
    assert short is not None
    again = short(*arguments(mixed))
    assert [tuple(out.shape) for out in again] == [(64, 48), (256, 512)] and len(fake_driver.launches) == 2
    large = gather(2048, 1024, n=(1024,), forms=[1, 0], w=[tensor(4096, 8), tensor(1024, 1024)], bias=[None, None])
    assert launcher(replace(large, plan_key="auto;")) is not None


def test_later_calls_come_by_the_short_way(launcher: Launcher, fake_driver: FakeDriver) -> None:
    short = launcher.shortcut(AllGatherGemm)
    call = gather(256, 64)
    assert short is not None and short(*arguments(call)) is None
    launcher(call)
    other = gather(256, 64)
    outs = short(*arguments(other))
    assert outs is not None and outs[0].shape == (512, 512)
    assert int(fake_driver.launches[-1].a[0][0]) == other.x.data_ptr()
    assert short(*arguments(gather(264, 64))) is None


def test_operands_in_other_layouts_are_copied(launcher: Launcher, fake_driver: FakeDriver) -> None:
    strided = tensor(256, 128)[:, :64]
    launcher(gather(256, 64, x=strided))
    assert int(fake_driver.launches[-1].a[0][0]) != strided.data_ptr()
    shard = tensor(256, 64)
    launcher(gather(256, 64, x=shard))
    assert int(fake_driver.launches[-1].a[0][0]) == shard.data_ptr()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: gather(16, 64, forms=[1], w=[tensor(32, 8)]), "gathered @ weight"),
        (lambda: gather(16, 60), "multiples of 8"),
        (lambda: gather(16, 64, n=(12,)), "multiples of 8"),
        (lambda: gather(16, 40, dim=1), "multiples of 64"),
        (lambda: gather(16, 64, n=(8,) * 5), "at most 4 products"),
        (lambda: gather(0, 64), "empty"),
        (lambda: replace(gather(16, 64), x=torch.ones(16, 64)), "float32"),
        (lambda: replace(gather(16, 64), world_size=17), "17"),
    ],
)
def test_what_no_kernel_takes_says_why(call: Any, says: str) -> None:
    refusal = gather_form_of(call())
    assert isinstance(refusal, str) and says in refusal


def test_columns_are_summed_over_the_shards() -> None:
    form = gather_form_of(gather(5, 7, 128, dim=2))
    assert isinstance(form, GatherForm)
    assert (form.size.rows, form.size.k, form.size.inner, form.size.columns) == (35, 128, 256, True)


def engine_only() -> Planned:
    return Planned(own_basis, available=frozenset({"all_gather_gemm/copy_engine"}))


def test_copy_engine_sends_rows_then_flags(
    launcher: Launcher, platform: FakePlatform, fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_tactics", engine_only())
    call = gather(4096, 1024)
    assert launcher(call) is not None
    assert len(platform.backing_of_group.allocated_bytes) == 2, "the workspace and the area"
    data = [copy for copy in fake_driver.copies if copy[2] > 4]
    flags = [copy for copy in fake_driver.copies if copy[2] == 4]
    assert len(data) == len(flags) > 0 and sum(copy[2] for copy in data) == call.x.numel() * 2
    assert [copy[2] > 4 for copy in fake_driver.copies] == [True, False] * len(data)
    assert {source for _, source, _ in flags} == {flags[0][1]}
    log = platform.fake_streams.log
    assert log.index("record 1 on 7") < log.index("99 waits 1") < log.index("record 2 on 99") < log.index("7 waits 2")


def test_captures_of_two_threads_have_a_side_stream_each(
    launcher: Launcher, platform: FakePlatform, fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_tactics", engine_only())
    streams, call = platform.fake_streams, gather(4096, 1024)
    launcher(call)
    beside = []
    for stream, capture in ((8, 41), (18, 42), (8, 41), (9, 43)):
        if capture == 43:  # the others have ended
            streams.captures.clear()
        platform.stream, streams.captures[stream] = stream, capture
        streams.log.clear()
        launcher(call)
        (side,) = {line.split()[0] for line in streams.log if " waits " in line} - {str(stream)}
        streams.captures[int(side)] = capture
        beside.append(side)
    assert beside == ["100", "101", "100", "100"], "99 is that of eager launches"


def test_transfers_of_a_launch_that_was_given_up_have_their_area_to_themselves(
    launcher: Launcher, platform: FakePlatform, fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_tactics", engine_only())
    launcher(gather(4096, 1024))
    platform.report(0, op=3, rank=0, peer=1, code=abi.PEER_GAVE_UP)
    with pytest.raises(PeerGaveUpError, match="rank 1 gave up"):
        launcher(gather(4096, 1024))
    assert launcher(gather(4096, 1024)) is not None
    assert len(platform.backing_of_group.allocated_bytes) == 4, "a new workspace and a new area"
    assert launcher(gather(4096, 1024)) is not None and len(platform.backing_of_group.allocated_bytes) == 4


@pytest.mark.parametrize("variant", ["copy_engine", "library"])
def test_what_was_called_before_keeps_no_area(
    launcher: Launcher, platform: FakePlatform, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    monkeypatch.setattr(launcher, "_tactics", Planned(own_basis, available=frozenset({f"all_gather_gemm/{variant}"})))
    held = platform.backing_of_group.held
    launcher(gather(4096, 1024))
    launcher(gather(16384, 1024))
    assert len(platform.backing_of_group.allocated_bytes) == 3, "a workspace, and an area that had to grow"
    assert len(held) == 2
    launcher(gather(4096, 1024))


def test_an_area_that_a_graph_holds_does_not_serve_a_later_workspace(
    launcher: Launcher, platform: FakePlatform, fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_tactics", engine_only())
    launcher(gather(4096, 1024))
    platform.fake_streams.capturing = 3
    launcher(gather(4096, 1024))
    platform.fake_streams.capturing = 0
    monkeypatch.setattr(launcher, "_tactics", Planned(own_basis, available=frozenset({"all_gather_gemm/push"})))
    launcher(gather(16384, 4096))
    assert len(platform.backing_of_group.allocated_bytes) == 3, "a larger workspace"
    monkeypatch.setattr(launcher, "_tactics", engine_only())
    launcher(gather(4096, 2048))
    assert len(platform.backing_of_group.allocated_bytes) == 4, "and an area that no replay writes"


def test_copy_engine_is_not_set_up_inside_a_capture(
    launcher: Launcher, platform: FakePlatform, fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_tactics", engine_only())
    platform.fake_streams.capturing = 3
    with pytest.raises(WorkspaceError, match="warm up first"):
        launcher(gather(4096, 1024))


def test_blocking_launches_do_not_use_the_copy_engine(
    launcher: Launcher, fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocking = read_settings({"CUDA_LAUNCH_BLOCKING": "1"})
    monkeypatch.setattr(tactics, "settings", lambda: blocking)
    monkeypatch.setattr(launcher, "_tactics", Planned(own_basis))
    assert launcher(gather(8192, 1024, n=(7168,))) is not None
    assert len(fake_driver.launches) == 1 and not fake_driver.copies
    assert not read_settings({"CUDA_LAUNCH_BLOCKING": "0"}).launches_block


@pytest.mark.parametrize("columns", [False, True])
def test_transfers_cover_every_shard_once_and_in_order(columns: bool) -> None:
    size = GatherSize(segment_rows=1000, k=64, n=(8,), world=4, columns=columns)
    choice = GatherSchedule(grid=8, group_rows=256, order=COLUMNS if columns else APART, mover=ENGINE_COPIES)
    layout = WorkspaceLayout(world=4, total_bytes=64 << 20, max_tiles=64)
    places = EnginePlaces(
        rank=1, layout=layout, workspaces=(1 << 40, 2 << 40, 3 << 40, 4 << 40),
        areas=(10 << 40, 20 << 40, 30 << 40, 40 << 40),
    )  # fmt: skip
    copies = transfers(5 << 40, size, choice, places)
    data, flags = copies[::2], copies[1::2]
    for peer, slot in ((0, 0), (3, 1), (2, 2)):
        mine = [one for one in data if one.target >> 40 == (peer + 1) * 10]
        assert sum(one.num_bytes for one in mine) == size.shard_bytes
        assert min(one.target for one in mine) == ((peer + 1) * 10 << 40) + slot * size.shard_bytes
    steps = [one.target >> 40 for one in data]
    assert steps == ([10, 40, 30] * 4 if columns else [10] * 4 + [40] * 4 + [30] * 4)
    assert len({one.target for one in flags}) == 12 and {one.num_bytes for one in flags} == {4}


def test_slices_that_would_be_empty_are_refused(fake_driver: FakeDriver) -> None:
    kernel = LoadedKernel(config=CONFIG, device_idx=0, function=ctypes.c_void_p(1))
    schedule = GatherSchedule(grid=4, mover=ENGINE_COPIES, slices=2)
    with pytest.raises(OperatorInputError, match="k 64 in 2 slices"):
        PreparedGather(kernel, replace(GOOD, schedule=schedule, landing=4096))
    with pytest.raises(ValueError, match="not a schedule"):
        GatherSchedule(grid=4, slices=2)


LAYOUT = WorkspaceLayout(world=2, total_bytes=64 << 20, max_tiles=1024)
GOOD = GatherLaunch(
    shard=Matrix(4096, 128, 64, 64), weights=(Matrix(4096, 512, 64, 64),), outs=(Matrix(4096, 256, 512, 512),),
    biases=(0,), size=GatherSize(segment_rows=128, k=64, n=(512,), world=2),
    schedule=GatherSchedule(grid=4),
    peers=PeerTable(rank=0, workspaces=(4096, 8192), layout=LAYOUT, fault_address=4096, timeout_s=1.0),
)  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"weights": ()}, "0 products"),
        ({"biases": (0, 0)}, "for each weight"),
        ({"biases": (4096,)}, "no bias"),
        ({"shard": Matrix(4096, 128, 64, 72)}, "one piece"),
        ({"outs": (Matrix(4096, 128, 512, 512),)}, "result"),
        ({"landing": 4096}, "area of its own"),
        ({"schedule": GatherSchedule(grid=4, order=COLUMNS)}, "order 2"),
        ({"schedule": GatherSchedule(grid=4, mover=ENGINE_COPIES)}, "area of its own"),
        ({"schedule": GatherSchedule(grid=4, mover=PEERS_READ, order=TOGETHER)}, "pushed by blocks"),
        ({"schedule": GatherSchedule(grid=4, mover=PEERS_READ), "result": 4096}, "not returned"),
        ({"schedule": GatherSchedule(grid=4, image_rows=64)}, "images of 64 rows"),
        ({"schedule": GatherSchedule(grid=4, order=TOGETHER, parts=8)}, "and 8 parts"),
    ],
)  # fmt: skip
def test_wrong_launches_are_refused_by_name(fake_driver: FakeDriver, wrong: dict[str, Any], says: str) -> None:
    kernel = LoadedKernel(config=CONFIG, device_idx=0, function=ctypes.c_void_p(1))
    PreparedGather(kernel, GOOD)
    with pytest.raises(OperatorInputError, match=says):
        PreparedGather(kernel, replace(GOOD, **wrong))


def test_a_push_is_told_its_pace_and_nothing_else_has_one(fake_driver: FakeDriver) -> None:
    kernel = LoadedKernel(config=CONFIG, device_idx=0, function=ctypes.c_void_p(1))
    for pace_ns in (0, 45):
        paced = replace(GOOD, schedule=GatherSchedule(grid=4, pace_ns=pace_ns))
        assert PreparedGather(kernel, paced).arguments[0].pace_ns == pace_ns
    for pace_ns, mover in ((-1, BLOCKS_PUSH), (45, PEERS_READ)):
        with pytest.raises(ValueError, match="not a schedule"):
            GatherSchedule(grid=4, pace_ns=pace_ns, mover=mover)


def test_a_streaming_gather_is_told_where_rows_and_results_lie(fake_driver: FakeDriver) -> None:
    choice = stream_choice(CONFIG, GOOD.size, 16, StreamForm((64, 64), 1))
    kernel = LoadedKernel(config=choice.config, device_idx=0, function=ctypes.c_void_p(1))
    two = replace(
        GOOD, weights=(Matrix(4096, 72, 64, 64), Matrix(5120, 8, 64, 64)), biases=(0, 0),
        outs=(Matrix(4096, 256, 72, 512), Matrix(8192, 256, 8, 8)), size=replace(GOOD.size, n=(72, 8)),
    )  # fmt: skip
    prepared = PreparedGather(kernel, replace(two, schedule=choice.schedule))
    packed, gather = prepared.arguments
    assert (packed.m, packed.n, packed.k[0]) == (256, 3 * 64, 64)  # each product in tiles of its own
    assert (gather.weights, list(gather.n)[:2], list(gather.out_stride)[:2]) == (2, [72, 8], [512, 8])
    assert list(gather.out_address)[:2] == [4096, 8192]
    assert [int(packed.weight[i][0]) for i in range(2)] == [4096, 5120]
    regions = [int(one[0]) for one in gather.arena]
    assert regions == [4096 + LAYOUT.region_offset + parity * LAYOUT.region_bytes for parity in range(2)]
    assert (gather.parts, gather.order) == (choice.schedule.parts, TOGETHER)
    moved = prepared.moved(8192, (12288, 16384), (20480, 24576), (0, 0), 0)
    packed, gather = moved.arguments
    assert (list(gather.out_address)[:2], gather.shard) == ([20480, 24576], 8192)
    assert [int(packed.weight[i][0]) for i in range(2)] == [12288, 16384]
    assert [int(one[0]) for one in gather.arena] == regions
    with pytest.raises(OperatorInputError, match="returns no rows"):
        PreparedGather(kernel, replace(GOOD, schedule=choice.schedule, result=4096))
    shared = stream_choice(CONFIG, GOOD.size, 16, StreamForm((64, 64), 2))
    with pytest.raises(OperatorInputError, match="clusters of 2"):
        PreparedGather(replace(kernel, config=shared.config), replace(GOOD, schedule=shared.schedule))


def test_a_workspace_that_is_too_small_is_refused() -> None:
    size = GatherSize(segment_rows=1 << 20, k=64, n=(8,), world=2)
    with pytest.raises(WorkspaceError, match="MKCOMPILE_ARENA_BYTES"):
        GatherSchedule(grid=4).check(size, replace(LAYOUT, max_tiles=8192))
    with pytest.raises(WorkspaceError, match="flags"):
        GatherSchedule(grid=4).check(size, LAYOUT)


def test_choices_suit_any_size() -> None:
    for rows, k, n, world in ((1, 8, 8, 2), (64, 8192, 7168, 2), (4096, 8192, 1280, 2), (128, 64, 8192, 8)):
        size = GatherSize(segment_rows=rows, k=k, n=(n,), world=world)
        for max_grid, returned in ((16, False), (128, True)):
            choice = choose_gather(CONFIG, size, max_grid, returned)
            schedule = choice.schedule
            assert 0 < schedule.grid <= max_grid and choice.us > 0
            assert not returned or choice.variant in ("push", "copy_engine")


def test_few_rows_lie_together_and_many_apart() -> None:
    few = GatherSize(segment_rows=32, k=8192, n=(7168,), world=2)
    assert choose_gather(CONFIG, few, 128).schedule.order == TOGETHER
    many = GatherSize(segment_rows=4096, k=8192, n=(7168,), world=2)
    assert choose_gather(CONFIG, many, 128).schedule.order == APART
    engine = engine_choice(CONFIG, many, 128)
    assert engine.schedule.by_engine and engine.us < 1.03 * 2 * 8192 * 7168 * 8192 / 750e6
    assert gather_schedule.choose_gather(CONFIG, many, 128).us <= engine.us


@pytest.mark.parametrize("variant", ["push", "remote_read", "copy_engine"])
def test_weights_of_very_different_widths_have_a_tile(
    variant: str, launcher: Launcher, fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together they are as wide as two tiles, which is all that a plan knows."""
    monkeypatch.setattr(launcher, "_tactics", Planned(own_basis, available=frozenset({f"all_gather_gemm/{variant}"})))
    outs = launcher(gather(256, 64, n=(504, 8)))
    assert outs is not None and [tuple(out.shape) for out in outs] == [(512, 504), (512, 8)]
    assert fake_driver.launches


def test_a_copied_operand_is_no_model_for_others(launcher: Launcher, fake_driver: FakeDriver) -> None:
    wide = tensor(512, 128)
    weight = wide[:, :64].t()  # rows 128 elements apart
    launcher(gather(256, 64, w=[weight]))
    assert fake_driver.moved_maps == 0
    shifted = torch.ones(512 * 128 + 4, dtype=torch.bfloat16)[4:].view(512, 128)[:, :64].t()
    launcher(gather(256, 64, w=[shifted]))
    assert int(fake_driver.launches[-1].weight[0][0]) != shifted.data_ptr(), "not aligned: copied, to other strides"
    assert fake_driver.moved_maps == 0
    launcher(gather(256, 64, w=[tensor(512, 128)[:, :64].t()]))
    assert fake_driver.moved_maps > 0


@pytest.mark.parametrize("variant", ["push", "remote_read", "copy_engine"])
def test_rows_that_have_no_room_are_left_to_the_reference(
    variant: str, platform: FakePlatform, launcher: Launcher, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(launcher, "_tactics", Planned(own_basis, available=frozenset({f"all_gather_gemm/{variant}"})))
    shard = torch.ones(1, 1, dtype=torch.bfloat16).expand(1 << 20, 1024)  # 2 GiB that nobody allocates
    assert launcher(replace(gather(8, 1024), x=shard)) is None
    assert "raise MKCOMPILE_ARENA_BYTES" in caplog.text and not platform.backing_of_group.allocated_bytes
    assert launcher(gather(256, 1024)) is not None


def test_the_library_multiplies_parameters() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 8))
    for bias in (None, torch.nn.Parameter(torch.ones(8))):
        out = torch.empty(6, 8)
        tensors = GatherTensors(
            shard=torch.ones(3, 4), w=[weight], weights=[weight], bias=[bias], outs=[out], gathered=None
        )
        ByLibrary._multiply(tensors, tensors.shard, 3)
        assert not out.requires_grad and torch.all(out[3:] == (4 if bias is None else 5))
