"""Kernels for few rows: which form a size gets, how it is launched, and the mailboxes that it needs."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch

from mkcompile.config import settings
from mkcompile.errors import OperatorInputError, WorkspaceError
from mkcompile.ops.gemm_all_reduce import GemmAllReduce
from mkcompile.plan import PRESETS, Policy, decide
from mkcompile.plan.plan import Tile
from mkcompile.runtime import resources, tactics
from mkcompile.runtime.form import Form
from mkcompile.runtime.kernel import LaunchArguments, LoadedKernel, PeerTable, PreparedLaunch
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.launcher import Launcher
from mkcompile.runtime.published import Basis
from mkcompile.runtime.stream_schedule import StreamForm, can_stream, most_clusters, stream_config, stream_tactic
from mkcompile.runtime.tactics import Planned, from_plan
from mkcompile.runtime.tensor_map import Matrix
from mkcompile.runtime.tile_schedule import LaunchSize, TileSchedule
from mkcompile.runtime.workspace import Demand, layout_for
from mkcompile.runtime.workspace_layout import WorkspaceLayout
from tests.plan.problems import problem
from tests.runtime.fakes import FakeDriver, FakePlatform, lone_group

REDUCE = KernelConfig(operator="gemm_all_reduce", broadcast="staged")
LAYOUT = WorkspaceLayout(world=2, total_bytes=64 << 20, max_tiles=1024)
PEERS = PeerTable(rank=1, workspaces=(4096, 8192), layout=LAYOUT, fault_address=4096, timeout_s=1.0)
NUM_SMS = 132


def arguments(m: int, n: int, k: int, schedule: TileSchedule) -> LaunchArguments:
    return LaunchArguments(
        terms=((Matrix(1 << 20, m, k, k), Matrix(2 << 20, n, k, k)),), out=Matrix(3 << 20, m, n, n + 8),
        schedule=schedule, peers=PEERS,
    )  # fmt: skip


def prepared(config: KernelConfig, given: LaunchArguments) -> PreparedLaunch:
    return PreparedLaunch(LoadedKernel(config=config, device_idx=0, function=ctypes.c_void_p(0)), given)


def size(m: int, n: int, k: int, world: int = 2) -> LaunchSize:
    return LaunchSize(m=m, n=n, k=k, world=world)


def test_results_are_stored_by_address_and_follow_moved_operands(fake_driver: FakeDriver) -> None:
    config, schedule = stream_tactic(REDUCE, size(33, 4096, 2048), StreamForm((64, 64), 2), NUM_SMS)
    launch = prepared(config, arguments(33, 4096, 2048, schedule))
    launch.run(5)
    launch.moved((4 << 20, 5 << 20, 6 << 20)).run(5)
    first, second = fake_driver.launches
    assert (first.out_address, first.out_stride, second.out_address) == (3 << 20, 4104, 6 << 20)
    assert fake_driver.grids == [128, 128], "64 tiles, two blocks each"
    assert (first.mailbox_offset, first.mailbox_bytes) == (LAYOUT.mailbox_offset, LAYOUT.mailbox_bytes)
    assert LAYOUT.mailbox_offset + 2 * LAYOUT.mailbox_bytes == LAYOUT.region_offset
    assert fake_driver.moved_maps == 2, "of a and the weight: the result has none"


def test_clusters_are_whole_and_have_something_to_multiply(fake_driver: FakeDriver) -> None:
    config = stream_config(REDUCE, (64, 64), 4)
    for grid, k in ((130, 2048), (128, 128)):
        with pytest.raises(OperatorInputError, match="clusters of 4"):
            prepared(config, arguments(8, 1024, k, TileSchedule(grid=grid)))
    assert not can_stream(config, size(8, 1024, 128))


def test_tiles_beyond_the_mailboxes_are_refused(fake_driver: FakeDriver) -> None:
    config = stream_config(REDUCE, (128, 128), 1)
    with pytest.raises(WorkspaceError, match="mailboxes"):
        prepared(config, arguments(4096, 8192, 64, TileSchedule(grid=128)))
    assert not can_stream(config, size(4096, 8192, 64))


def test_groups_hand_partials_over_or_take_turns_where_blocks_have_several_tiles() -> None:
    def form(base: KernelConfig, m: int, k: int, form: StreamForm) -> tuple[bool, bool]:
        config = stream_tactic(base, size(m, 8192, k), form, NUM_SMS)[0]
        return config.hands_over, config.ping_pong

    whole = StreamForm((128, 128), 1)
    assert form(REDUCE, 1024, 1024, whole) == (True, False) and form(REDUCE, 256, 1024, whole) == (False, False)
    assert form(REDUCE, 512, 1024, whole) == (False, True), "of two tiles a block each group has one"
    assert form(KernelConfig(), 512, 1024, whole) == (False, True)
    assert form(REDUCE, 512, 1024, StreamForm((128, 128), 2)) == (False, True)
    assert form(REDUCE, 128, 1024, StreamForm((128, 128), 2)) == (False, False)
    assert form(REDUCE, 512, 1024, StreamForm((64, 32), 1)) == (False, False)
    shared, scatter = StreamForm((128, 64), 2), KernelConfig(operator="gemm_reduce_scatter")
    assert form(REDUCE, 128, 1024, shared) == (False, False) and form(scatter, 128, 1024, shared) == (False, True)
    assert form(REDUCE, 1024, 3584, whole) == (False, True), "long products hide all that a group does besides"
    assert form(REDUCE, 512, 3584, StreamForm((128, 128), 1, "handed")) == (True, False)


@pytest.mark.parametrize(
    ("m", "k", "way"), [(256, 3584, "turns"), (512, 3584, "ends"), (512, 1024, "handed"), (8, 1024, "store")]
)
def test_a_plan_says_what_groups_do(m: int, k: int, way: str) -> None:
    one = problem("gemm_all_reduce", m, 8192, k)
    available = frozenset({"gemm_all_reduce/stream"})
    plan = decide(one, PRESETS["2xh200"], Policy(fuse="always", available=available)).plan
    assert plan.transport == way
    form = Form(config=REDUCE, size=size(m, 8192, k), out_shape=(m, 8192), scale=1.0)
    for transport, expected in (("turns", (True, False)), ("handed", (False, True))):
        tactic = from_plan(form, replace(plan, transport=transport, tile=Tile(rows=128, columns=128), split=1), 128)
        assert tactic is not None and (tactic[0].ping_pong, tactic[0].hands_over) == expected
    tactic = from_plan(form, replace(plan, transport="ends", tile=Tile(rows=128, columns=128), split=2), 128)
    assert tactic is not None and tactic[0].shares_ends and tactic[0].ping_pong and tactic[1].grid % 2 == 0


def test_partials_are_sent_over_the_next_tile_but_no_faster_than_the_link() -> None:
    whole = StreamForm((128, 128), 1)
    paced = stream_tactic(REDUCE, size(512, 8192, 3584), whole, NUM_SMS)[1]
    assert 0.55 < paced.pace_ns * 32 / 20e3 < 0.65, "32 units in 0.6 of a tile of 20 us"
    link = stream_tactic(REDUCE, size(512, 8192, 1024), whole, NUM_SMS)[1]
    assert 0.9 < link.pace_ns / (1024 * 128 / 366) < 1, "128 blocks together a little faster than the link"


def test_launches_start_early_unless_ranks_share_a_device(fake_driver: FakeDriver) -> None:
    config, schedule = stream_tactic(REDUCE, size(33, 4096, 2048), StreamForm((64, 64), 2), NUM_SMS)
    given = arguments(33, 4096, 2048, schedule)
    together = replace(given, peers=replace(PEERS, share_device=True))
    assert [len(prepared(config, one)._attributes) for one in (given, together)] == [2, 1], "the cluster's is the other"


def test_rows_of_one_owner_are_walked_together_where_tiles_have_one_owner() -> None:
    scatter = KernelConfig(operator="gemm_reduce_scatter")

    def band(base: KernelConfig, m: int, world: int = 2) -> int:
        return stream_tactic(base, size(m, 8192, 1024, world), StreamForm((128, 64), 1), NUM_SMS)[1].raster_group

    assert (band(scatter, 512), band(scatter, 1024, 4), band(scatter, 256)) == (2, 2, 1)
    assert (band(scatter, 128), band(scatter, 384), band(REDUCE, 512)) == (1, 3, 4), "all rows"
    large = stream_tactic(scatter, size(512, 8192, 3584), StreamForm((128, 64), 1), NUM_SMS)[1]
    assert large.raster_group == 4, "a weight that no cache keeps is not read once for each owner"


def test_blocks_share_tiles_evenly() -> None:
    config = stream_config(REDUCE, (64, 64), 1)
    assert stream_tactic(REDUCE, size(8, 8192, 1024), StreamForm((64, 64), 1), NUM_SMS)[1].grid == 128
    assert stream_tactic(REDUCE, size(65, 5120, 1024), StreamForm((64, 64), 1), NUM_SMS)[1].grid == 80
    assert (most_clusters(config, NUM_SMS), most_clusters(replace(config, split=2), NUM_SMS)) == (132, 64)


@pytest.mark.parametrize("world", [2, 3, 8, 16])
def test_a_workspace_grows_to_the_mailboxes_that_a_launch_needs_and_stays(world: int) -> None:
    layout = None
    for m in (8, 64, 512, 1024, 8):
        one = size(m, 8192, 1024, world)
        config, schedule = stream_tactic(REDUCE, one, StreamForm((64, 128), 1), NUM_SMS)
        if not can_stream(config, one):
            continue
        demand = Demand.of(config, schedule, one)
        layout = layout_for(world, demand, 1 << 30, layout)
        layout.require_mailbox(config, one.tiles(config))
        assert layout_for(world, demand, 1 << 30, layout) is layout
    assert layout is not None


def test_a_small_cap_has_small_mailboxes() -> None:
    layout = layout_for(2, Demand(tiles=16, region_bytes=1 << 20), 8 << 20, None)
    assert layout.total_bytes == 8 << 20 and 0 < 2 * layout.mailbox_bytes <= 2 << 20 and layout.region_bytes > 1 << 20


@pytest.mark.parametrize(("arena_mib", "streams"), [(128, True), (64, True), (63, False), (32, False)])
def test_an_arena_without_room_for_mailboxes_gets_another_kernel(
    platform: FakePlatform, fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, arena_mib: int, streams: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """256 x 16384 results are 8 MiB for each parity and peer: a quarter of 64 MiB, all of them."""
    small = replace(settings(), arena_bytes=arena_mib << 20)
    monkeypatch.setattr(tactics, "settings", lambda: small)
    monkeypatch.setattr(resources, "settings", lambda: small)
    x, w = torch.ones(256, 1024, dtype=torch.bfloat16), torch.ones(16384, 1024, dtype=torch.bfloat16).t()
    with lone_group() as group:
        launcher = Launcher(platform, Planned(lambda: Basis(topology=PRESETS["2xh200"])))
        assert launcher(GemmAllReduce([x], [w], None, "sum", 2, group, "always;key")) is not None
    assert [config.streams for config in platform.loaded] == [streams] and len(fake_driver.launches) == 1
    assert ("raise MKCOMPILE_ARENA_BYTES" in caplog.text) == (not streams)
