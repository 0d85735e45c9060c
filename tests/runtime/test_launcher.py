"""The launcher on a machine without GPUs: what it launches, what it keeps, what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mkcompile.errors import KernelFaultError, LaunchOrderError, PeerTimeoutError, WorkspaceError
from mkcompile.ops.all_gather_gemm import AllGatherGemm
from mkcompile.ops.gemm_all_reduce import GemmAllReduce
from mkcompile.ops.gemm_reduce_scatter import GemmReduceScatter
from mkcompile.ops.registry import Call
from mkcompile.plan.buckets import entry_name
from mkcompile.plan.candidates import Site, candidates
from mkcompile.plan.decide import Policy, unfused_plan
from mkcompile.plan.disk import Measured, Results
from mkcompile.plan.kernels import AVAILABLE
from mkcompile.plan.table import PlanTable
from mkcompile.plan.topology import preset
from mkcompile.runtime import abi
from mkcompile.runtime.exchange import Exchange
from mkcompile.runtime.launcher import Launcher
from mkcompile.runtime.published import Basis
from mkcompile.runtime.tactics import Planned
from tests.runtime.fakes import FakeDriver, FakePlatform, lone_group

GROUP = "0"


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def all_reduce(m: int = 256, n: int = 512, k: int = 64, **changes: Any) -> GemmAllReduce:
    weight = tensor(n, k).t()
    call = GemmAllReduce([tensor(m, k)], [weight], None, "sum", 2, GROUP, "key")
    return replace(call, **changes)


def reduce_scatter(shape: tuple[int, ...], dim: int, k: int = 64, **changes: Any) -> GemmReduceScatter:
    rows = tensor(*shape).numel() // shape[-1]
    weight = tensor(shape[-1], k).t()
    call = GemmReduceScatter([tensor(rows, k)], [weight], None, shape, dim, "sum", 2, GROUP, "key")
    return replace(call, **changes)


def address_in(block: Any) -> int:
    """The address that the fake driver put into a tensor map."""
    return int(block[0])


def test_a_call_becomes_one_launch_with_its_own_addresses(launcher: Launcher, fake_driver: FakeDriver) -> None:
    call = all_reduce(bias=tensor(512), reduce_op="avg")
    out = launcher(call)
    assert out is not None and out.shape == (256, 512) and out.dtype == torch.bfloat16
    (block,) = fake_driver.launches
    assert (block.m, block.n, block.k[0], block.terms) == (256, 512, 64, 1)
    assert (block.rank, block.world, block.segments, block.segment_rows) == (0, 2, 1, 256)
    assert block.scale == 0.5
    assert block.bias == call.bias.data_ptr()  # type: ignore[union-attr]
    assert address_in(block.a[0]) == call.x[0].data_ptr()
    assert address_in(block.weight[0]) == call.w[0].data_ptr()
    assert address_in(block.out) == out.data_ptr()
    assert list(block.workspace[:2]) == [1 << 40, 2 << 40]
    assert 1 <= fake_driver.grids[0] <= 128, "the rest of the SMs is left to others"


def test_new_tensors_of_the_same_shape_need_no_new_decision(
    launcher: Launcher, platform: FakePlatform, fake_driver: FakeDriver
) -> None:
    calls = [all_reduce() for _ in range(3)]
    outs = [launcher(call) for call in calls + calls]
    assert len(platform.loaded) == 1
    assert [address_in(block.a[0]) for block in fake_driver.launches] == [c.x[0].data_ptr() for c in calls + calls]
    assert [address_in(block.out) for block in fake_driver.launches] == [out.data_ptr() for out in outs]  # type: ignore[union-attr]


def test_reduce_scatter_divides_rows_by_the_scattered_dimension(launcher: Launcher, fake_driver: FakeDriver) -> None:
    out = launcher(reduce_scatter((3, 8, 5, 16), 1))
    assert out is not None and out.shape == (3, 4, 5, 16)
    block = fake_driver.launches[-1]
    assert (block.m, block.segments, block.segment_rows) == (3 * 8 * 5, 3, 4 * 5)
    out = launcher(reduce_scatter((8, 16), 0))
    assert out is not None and out.shape == (4, 16)
    assert (fake_driver.launches[-1].segments, fake_driver.launches[-1].segment_rows) == (1, 4)


def test_products_are_summed_in_one_launch(launcher: Launcher, fake_driver: FakeDriver) -> None:
    x, w = [tensor(256, 64), tensor(256, 32)], [tensor(512, 64).t(), tensor(512, 32).t()]
    assert launcher(all_reduce(x=x, w=w)) is not None
    block = fake_driver.launches[-1]
    assert block.terms == 2 and list(block.k[:2]) == [64, 32]
    assert address_in(block.weight[1]) == w[1].data_ptr()


@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_transposed_and_sliced_weights_are_read_in_place(
    launcher: Launcher, platform: FakePlatform, fake_driver: FakeDriver, layout: str
) -> None:
    whole = tensor(1024, 128) if layout == "nk" else tensor(128, 1024)
    weight = whole[256:768, 64:].t() if layout == "nk" else whole[64:, 256:768]
    assert weight.shape == (64, 512)
    assert launcher(all_reduce(w=[weight])) is not None
    assert address_in(fake_driver.launches[-1].weight[0]) == weight.data_ptr()
    assert platform.loaded[-1].weight_layout == layout


def test_an_operand_that_can_not_be_read_in_place_is_copied(launcher: Launcher, fake_driver: FakeDriver) -> None:
    misaligned = tensor(256, 72)[:, 4:68]
    transposed = tensor(64, 256).t()
    odd_rows = tensor(256, 68)[:, :64]
    for x_MK in (misaligned, transposed, odd_rows, tensor(1, 64).expand(256, 64)):
        for _ in range(2):
            assert launcher(all_reduce(x=[x_MK])) is not None
            assert address_in(fake_driver.launches[-1].a[0]) not in (0, x_MK.data_ptr())
    assert not any(one.launches for one in launcher._operations.values()), "a copy has other addresses each time"  # type: ignore[union-attr]
    aligned = tensor(256, 64)
    launcher(all_reduce(x=[aligned]))
    assert address_in(fake_driver.launches[-1].a[0]) == aligned.data_ptr()


@pytest.mark.parametrize(
    "call",
    [
        lambda: all_reduce(k=60),
        lambda: all_reduce(n=516),
        lambda: all_reduce(m=0),
        lambda: all_reduce(x=[tensor(4, 64, dtype=torch.float32)], w=[tensor(64, 64, dtype=torch.float32)]),
        lambda: all_reduce(x=[tensor(4, 8)] * 5, w=[tensor(8, 8)] * 5),
        lambda: reduce_scatter((8, 16), 1),
        lambda: AllGatherGemm(tensor(4, 8), [tensor(8, 8)], [None], [1], 0, False, 2, GROUP, "key"),
    ],
    ids=["k", "n", "empty", "dtype", "terms", "columns", "form"],
)
def test_what_no_kernel_takes_is_left_to_the_reference(
    launcher: Launcher, platform: FakePlatform, fake_driver: FakeDriver, call: Any
) -> None:
    made: Call = call()
    assert launcher(made) is None and launcher(made) is None
    assert not fake_driver.launches and not platform.backing_of_group.allocated_bytes


def test_a_group_that_can_not_launch_runs_unfused(platform: FakePlatform, fake_driver: FakeDriver) -> None:
    platform.group_obstacle = "no peer access between the GPUs of ranks 0->1"
    with lone_group():
        launcher = Launcher(platform)
        assert launcher(all_reduce()) is None and launcher(all_reduce()) is None
        platform.group_obstacle = ""
        assert launcher(all_reduce()) is None, "decided once for the life of the group"
    with lone_group():
        assert launcher(all_reduce()) is not None, "another group of the same name is asked anew"


def test_a_group_that_ended_gives_its_memory_back(platform: FakePlatform, fake_driver: FakeDriver) -> None:
    launcher = Launcher(platform)
    for _ in range(20):  # more lives than there are fault reports
        with lone_group():
            assert launcher(all_reduce()) is not None
            assert launcher(all_reduce(m=64)) is not None
    assert launcher.held_bytes() == platform.backing_of_group.allocated_bytes[-1]
    assert platform.backing_of_group.settled == 19


def test_a_graph_keeps_the_memory_of_a_group_that_ended(platform: FakePlatform, fake_driver: FakeDriver) -> None:
    launcher = Launcher(platform)
    for _ in range(2):
        with lone_group():
            launcher(all_reduce())
            platform.fake_streams.capturing = 5
            launcher(all_reduce())
            platform.fake_streams.capturing = 0
    assert launcher.held_bytes() == sum(platform.backing_of_group.allocated_bytes)
    assert len(launcher._resources.ended) == 1 and platform.backing_of_group.settled == 0


def test_a_group_that_is_gone_is_closed_when_the_next_new_one_is_met(
    platform: FakePlatform, fake_driver: FakeDriver
) -> None:
    with lone_group():
        launcher, backing = Launcher(platform), platform.backing_of_group
        first, second, third = (dist.new_group([0, 1]) for _ in range(3))
        launcher(all_reduce())
        launcher(all_reduce(group=first.group_name))
        dist.destroy_process_group(first)
        launcher(all_reduce(m=64))
        assert backing.settled == 0, "a new call of a known group waits for nobody"
        platform.fake_streams.capturing = 5
        with pytest.raises(WorkspaceError, match="warm up first"):
            launcher(all_reduce(group=second.group_name))
        assert backing.settled == 0, "a capture can't wait for the device"
        platform.fake_streams.capturing = 0
        launcher(all_reduce(group=third.group_name))
        assert backing.settled == 1 and len(backing.held) == 2
        assert launcher.held_bytes() == 2 * backing.allocated_bytes[-1]
        left = launcher._resources.groups.values()
        assert len(left) == 3 and all(one.group in left for one in launcher._operations.values())  # type: ignore[union-attr]


def test_a_group_whose_end_was_interrupted_is_closed_at_the_next_one(
    platform: FakePlatform, fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with lone_group():
        launcher, backing = Launcher(platform), platform.backing_of_group
        first, second, third = (dist.new_group([0, 1]) for _ in range(3))
        for group in (first, second):
            launcher(all_reduce(group=group.group_name))
        for group in (first, second):
            dist.destroy_process_group(group)
        with monkeypatch.context() as during, pytest.raises(KeyboardInterrupt):
            during.setattr(backing, "settle", interrupt)
            launcher(all_reduce(group=third.group_name))
        assert launcher.held_bytes() == sum(backing.allocated_bytes[:2]), "both are remembered"
        launcher(all_reduce(group=third.group_name))
        board = launcher._resources.board
        assert launcher.held_bytes() == backing.allocated_bytes[2] and len(backing.held) == 1
        assert not launcher._resources.ended and board is not None and len(board._slots) == 1


def test_ranks_that_launch_nothing_are_not_waited_for(
    platform: FakePlatform, fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform.group_obstacle = "the group is a fake one"
    steps: list[str] = []

    def gather(self: Exchange, step: str, value: str) -> tuple[str, ...]:
        steps.append(step)
        return value, value

    monkeypatch.setattr(Exchange, "gather", gather)
    with lone_group():
        assert Launcher(platform)(all_reduce()) is None
    assert steps == ["devices"]


def test_launches_on_several_streams_form_one_chain(launcher: Launcher, platform: FakePlatform) -> None:
    log = platform.fake_streams.log
    for stream in (7, 7, 9, 7):
        platform.stream = stream
        launcher(all_reduce())
    assert log == ["record 1 on 7", "9 waits 1", "record 1 on 9", "7 waits 1", "record 1 on 7"], (
        "none while there is one"
    )


def test_a_capture_is_a_chain_of_its_own(launcher: Launcher, platform: FakePlatform) -> None:
    streams = platform.fake_streams
    launcher(all_reduce())
    platform.stream, streams.capturing = 8, 41
    launcher(all_reduce())
    platform.stream = 9
    launcher(all_reduce())
    platform.stream, streams.capturing = 9, 0
    launcher(all_reduce())
    platform.stream, streams.capturing = 8, 42
    launcher(all_reduce())
    assert streams.log == [
        "record 1 on 8", "9 waits 1", "record 1 on 9", "record 2 on 7", "9 waits 2", "record 2 on 9", "record 3 on 8"
    ]  # fmt: skip


def test_captures_of_two_threads_are_a_chain_each(launcher: Launcher, platform: FakePlatform) -> None:
    streams = platform.fake_streams
    launcher(all_reduce())
    for stream, capture in ((8, 41), (18, 42), (9, 41), (19, 42)):
        platform.stream, streams.capturing = stream, capture
        launcher(all_reduce())
    assert streams.log == [
        "record 1 on 8", "record 2 on 18", "9 waits 1", "record 1 on 9", "19 waits 2", "record 2 on 19"
    ]  # fmt: skip


def test_a_capture_without_warm_up_says_to_warm_up(launcher: Launcher, platform: FakePlatform) -> None:
    platform.fake_streams.capturing = 1
    with pytest.raises(WorkspaceError, match="warm up first"):
        launcher(all_reduce())
    platform.fake_streams.capturing = 0
    launcher(all_reduce(m=64, n=4096))
    platform.fake_streams.capturing = 1
    assert launcher(all_reduce(m=64, n=4096)) is not None
    with pytest.raises(WorkspaceError, match="new workspace; warm up first"):
        launcher(all_reduce(m=16384, n=16384))


def test_growth_retires_the_old_workspace_and_its_launches(
    launcher: Launcher, platform: FakePlatform, fake_driver: FakeDriver
) -> None:
    backing = platform.backing_of_group
    small = all_reduce(m=64)
    launcher(small)
    launcher(all_reduce(m=16384, n=16384))
    assert len(backing.allocated_bytes) == 2 and backing.allocated_bytes[1] > backing.allocated_bytes[0]
    assert backing.settled == 1 and launcher.held_bytes() == backing.allocated_bytes[1]
    launcher(small)
    assert fake_driver.launches[-1].region_bytes == fake_driver.launches[1].region_bytes, "it moved to the new one"
    assert all(len(one.launches) == 1 for one in launcher._operations.values()), "and nothing refers to the old one"  # type: ignore[union-attr]
    assert len(backing.allocated_bytes) == 2


def test_a_workspace_that_a_graph_has_seen_is_kept(launcher: Launcher, platform: FakePlatform) -> None:
    backing = platform.backing_of_group
    launcher(all_reduce(m=64))
    platform.fake_streams.capturing = 5
    launcher(all_reduce(m=64))
    platform.fake_streams.capturing = 0
    launcher(all_reduce(m=16384, n=16384))
    assert backing.settled == 0 and launcher.held_bytes() == sum(backing.allocated_bytes)


def test_a_timeout_is_raised_by_the_next_call_and_the_workspace_made_anew(
    launcher: Launcher, platform: FakePlatform
) -> None:
    backing = platform.backing_of_group
    launcher(all_reduce())
    platform.report(
        0, op=2, rank=0, peer=1, role=2, tile=3, expected=9, seen=8, waited_ns=2_500_000_000, code=abi.PEER_TIMEOUT
    )
    with pytest.raises(PeerTimeoutError) as caught:
        launcher(AllGatherGemm(tensor(4, 8), [tensor(8, 8)], [None], [0], 0, False, 2, GROUP, "key"))
    report = caught.value.report
    assert (report.operator, report.rank, report.peer, report.role) == ("gemm_all_reduce", 0, 1, "store")
    assert (report.tile, report.expected, report.seen, report.waited_s) == (3, 9, 8, 2.5)
    assert len(backing.allocated_bytes) == 1
    assert launcher(all_reduce()) is not None
    assert len(backing.allocated_bytes) == 2 and backing.settled == 1
    assert launcher(all_reduce()) is not None and len(backing.allocated_bytes) == 2


def test_a_workspace_found_in_use_is_an_order_error(launcher: Launcher, platform: FakePlatform) -> None:
    launcher(all_reduce())
    platform.report(0, op=1, rank=0, code=abi.LAUNCH_ORDER)
    with pytest.raises(LaunchOrderError, match="CUDA graph was replayed"):
        launcher(all_reduce())


def test_a_stall_inside_a_kernel_is_an_error_of_its_own(launcher: Launcher, platform: FakePlatform) -> None:
    launcher(all_reduce())
    platform.report(0, op=1, rank=0, role=1, block=17, seen=5, code=abi.LOCAL_STALL)
    with pytest.raises(KernelFaultError, match="block 17"):
        launcher(all_reduce())


def test_the_planner_chooses_kernel_and_schedule_and_may_leave_a_size_unfused(
    launcher: Launcher, platform: FakePlatform, fake_driver: FakeDriver
) -> None:
    large, small = all_reduce(m=8192, n=8192, k=3584), all_reduce(m=1, n=64, k=64)
    compiled = {"auto": "auto;key", "always": "always;key", "by hand": ""}
    assert launcher(replace(large, plan_key=compiled["auto"])) is not None
    assert launcher(replace(small, plan_key=compiled["auto"])) is None
    assert launcher(replace(small, plan_key=compiled["always"])) is not None
    assert launcher(replace(small, plan_key=compiled["by hand"])) is not None
    table = PlanTable(topology=preset("2xh200"), policy=Policy(reserve_sms=4, available=AVAILABLE))
    plan = table.launch(large.problem())
    assert (platform.loaded[0].block_m, platform.loaded[0].block_n) == (plan.tile.rows, plan.tile.columns)
    assert fake_driver.grids[0] == plan.grid and fake_driver.launches[0].lag == plan.lag


def test_measurements_of_rank_0_go_before_predictions(platform: FakePlatform, fake_driver: FakeDriver) -> None:
    call = all_reduce(m=8192, n=8192, k=3584, plan_key="auto;key")
    topology, tuned = preset("2xh200"), Results()
    site = Site(problem=call.problem(), topology=topology, reserve_sms=4)
    slow = next(one.plan for one in candidates(site) if one.plan.name == "gemm_all_reduce/staged/64x256x64")
    tuned.add(entry_name(call.problem()), Measured(plan=slow, seconds=1e-3))
    tuned.add(entry_name(call.problem()), Measured(plan=unfused_plan(call.problem(), topology), seconds=2e-3))
    with lone_group():
        launcher = Launcher(platform, Planned(lambda: Basis(topology=topology, tuned=tuned)))
        assert launcher(call) is not None
        assert (platform.loaded[0].block_m, platform.loaded[0].block_n) == (64, 256)
    tuned.add(entry_name(call.problem()), Measured(plan=unfused_plan(call.problem(), topology), seconds=0.5e-3))
    with lone_group():
        launcher = Launcher(platform, Planned(lambda: Basis(topology=topology, tuned=tuned)))
        assert launcher(call) is None, "the unfused sequence was faster"


def test_what_was_called_before_keeps_no_workspace(launcher: Launcher, platform: FakePlatform) -> None:
    backing = platform.backing_of_group
    launcher(all_reduce())
    launcher(all_reduce(m=65536))
    assert [one.size_bytes for one in backing.held] == backing.allocated_bytes[1:], "the larger one alone"
    launcher(all_reduce())
    assert len(backing.allocated_bytes) == 2, "which serves the first call, too"
