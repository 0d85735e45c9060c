"""Results that peers store into: where they lie, when a place is free again and for which stream, and lack of room."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce

from mkcompile.errors import WorkspaceError
from mkcompile.ops import registry
from mkcompile.ops.gemm_all_reduce import GemmAllReduce
from mkcompile.plan import key
from mkcompile.runtime import abi
from mkcompile.runtime.chain import LaunchChain
from mkcompile.runtime.exchange import Exchange
from mkcompile.runtime.external import Blueprint
from mkcompile.runtime.launcher import Launcher
from mkcompile.runtime.machine import own_basis
from mkcompile.runtime.results import Result, Results
from mkcompile.runtime.tactics import Planned
from tests.runtime.conftest import PANELS
from tests.runtime.fakes import FakeBacking, FakeDriver, FakePlatform, FakeStreams, lone_group

MIB = 1 << 20
BIG = Blueprint((4 * MIB,), (1,), torch.bfloat16, torch.device("cpu"))  # 8 MiB
STAYS = key.with_facts("always;a problem", [key.ALONE, key.STAYS])
PEER = 2 << 40
PLANNED: dict[str, Any] = {"mkernel.fuse": "always", "mkernel.results": "planned"}


@pytest.fixture
def streams() -> FakeStreams:
    return FakeStreams()


@pytest.fixture
def results(fake_driver: FakeDriver, streams: FakeStreams) -> Iterator[Results]:
    with lone_group():
        yield new_results(streams)


def new_results(streams: FakeStreams, limit_bytes: int = 32 * MIB) -> Results:
    assert dist.group.WORLD is not None
    return Results(Exchange(dist.group.WORLD, "test"), FakeBacking(2), LaunchChain(streams), limit_bytes)


def take(results: Results, stream: int = 7, capture: int = 0, blueprint: Blueprint = BIG) -> Result:
    found = taken(results, stream, capture, blueprint)
    assert found is not None
    return found


def taken(results: Results, stream: int = 7, capture: int = 0, blueprint: Blueprint = BIG) -> Result | None:
    with results._chain.lock:
        return results.take(blueprint, stream, capture)


def test_a_result_is_a_tensor_at_one_offset_on_every_rank(results: Results) -> None:
    first, second = take(results), take(results)
    assert (first.offset, second.offset) == (0, 8 * MIB)
    assert first.outs[1] == PEER and second.outs == (first.outs[0] + 8 * MIB, PEER + 8 * MIB)
    assert first.tensor.data_ptr() == first.outs[0] and first.tensor.dtype == torch.bfloat16
    first.tensor.fill_(1)
    second.tensor.fill_(2)
    assert bool((first.tensor == 1).all()), "apart from each other"


def test_a_place_is_taken_as_long_as_anything_uses_its_storage(results: Results) -> None:
    one = take(results)
    view = one.tensor[5:10].view(5)
    reused = torch._C._dynamo.guards._reinterpret_tensor(one.tensor, (8, 8), (8, 1), 0)
    del one
    assert take(results).offset == 8 * MIB
    del view
    assert take(results).offset == 8 * MIB, "the first result of this test is still read by a view"
    del reused
    assert take(results).offset == 0


def test_without_room_there_is_none(results: Results) -> None:
    held = [take(results) for _ in range(4)]
    assert taken(results) is None
    held.pop(1)
    assert take(results).offset == 8 * MIB


def test_memory_is_added_up_to_the_limit(fake_driver: FakeDriver, streams: FakeStreams) -> None:
    with lone_group():
        results = new_results(streams, limit_bytes=40 * MIB)
        held = [take(results) for _ in range(5)]
        assert [one.offset for one in held] == [i * 8 * MIB for i in range(5)] and results.held_bytes == 40 * MIB
        assert taken(results) is None


def test_ranks_without_memory_go_without(fake_driver: FakeDriver, streams: FakeStreams) -> None:
    with lone_group():
        results = new_results(streams)
        results._backing.allocation_failure = "out of memory"  # type: ignore[attr-defined]
        assert taken(results) is None
        results._backing.allocation_failure = ""  # type: ignore[attr-defined]
        assert taken(results) is None, "and do not ask again"


def test_a_place_is_used_in_another_stream_after_the_work_of_its_own(results: Results, streams: FakeStreams) -> None:
    one = take(results, stream=7)
    assert streams.log == []
    two = take(results, stream=8)
    assert streams.log == ["record 1 on 7", "8 waits 1"], "what is free was free for stream 7"
    del one
    three = take(results, stream=8)
    assert streams.log[2:] == ["record 1 on 7", "8 waits 1"], "readers of the first result may have come since"
    assert three.offset == 0
    del two, three
    take(results, stream=8)
    assert len(streams.log) == 4, "a stream is in order by itself"


def test_places_of_a_graph_are_its_own(results: Results, streams: FakeStreams) -> None:
    eager = take(results)
    captured = take(results, stream=9, capture=3)
    assert captured.offset == 8 * MIB
    del captured
    again = take(results, stream=9, capture=3)
    assert again.offset == 8 * MIB, "dead in the graph: free in the graph"
    del again
    assert take(results).offset == 16 * MIB, "but not for eager launches"
    other = take(results, stream=9, capture=4)
    assert other.offset == 16 * MIB, "and not for another graph"
    del eager, other
    held = [take(results) for _ in range(2)]
    assert [one.offset for one in held] == [0, 24 * MIB] and taken(results) is None
    assert taken(results, 9, 5) is None, "a capture adds no memory"
    assert streams.log == []


def test_what_a_capture_carves_leaves_readers_in_other_streams_their_place(results: Results) -> None:
    first, second = take(results, stream=7), take(results, stream=8)
    del first
    assert take(results, stream=9, capture=3).offset == 16 * MIB, "stream 7 may still read the first place"
    del second
    assert take(results, stream=9, capture=4).offset == 8 * MIB


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5 * MIB), st.integers(0, 2)), max_size=40))
def test_living_results_never_overlap(steps: list[tuple[int, int, int]]) -> None:
    """And two ranks that do the same have the same offsets."""
    with pytest.MonkeyPatch.context() as patch, lone_group():
        patch.setattr(Exchange, "gather", lambda self, step, value: (value,) * self.world_size)
        ranks = [new_results(FakeStreams()) for _ in range(2)]
        held: list[list[Result]] = []
        for drop, elements, capture in steps:
            if held and drop > 4:
                held.pop(drop % len(held))
            shape = Blueprint((elements,), (1,), torch.float16, torch.device("cpu"))
            places = [taken(one, 7 + capture, capture, shape) for one in ranks]
            assert len({None if one is None else one.offset for one in places}) == 1
            if places[0] is not None:
                held.append([one for one in places if one is not None])
            spans = sorted((one.offset, one.offset + 2 * one.tensor.numel()) for one, _ in held)
            assert all(end <= start for (_, end), (start, _) in pairwise(spans))
            assert all(one.offset + 2 * one.tensor.numel() <= 32 * MIB for one, _ in held)


def planned(m: int = 256, n: int = 512, **changes: Any) -> GemmAllReduce:
    x, w = torch.ones(m, 64, dtype=torch.bfloat16), torch.ones(n, 64, dtype=torch.bfloat16).t()
    return replace(GemmAllReduce([x], [w], None, "sum", 2, "0", STAYS), **changes)


def kinds(platform: FakePlatform) -> list[str]:
    return [config.broadcast for config in platform.loaded]


def test_a_result_that_stays_in_the_graph_is_stored_into_by_peers(
    launcher: Launcher, platform: FakePlatform, fake_driver: FakeDriver
) -> None:
    outs = [launcher(planned()) for _ in range(3)]
    assert kinds(platform) == ["direct", "staged"], "and the kernel for lack of room"
    assert platform.compiled_together == [("direct", "staged")]
    first, second, third = fake_driver.launches
    for block, out in zip(fake_driver.launches, outs, strict=True):
        assert isinstance(out, Tensor)
        offset = out.data_ptr() - outs[0].data_ptr()  # type: ignore[union-attr]
        assert [block.out[0], block.peer_out[0][0], block.peer_out[1][0]] == [out.data_ptr()] * 2 + [PEER + offset]
    assert len({first.identity, second.identity, third.identity}) == 3, "ranks at other offsets are another launch"
    kept = outs.pop()
    outs.clear()
    again = launcher(planned())
    assert again is not None and fake_driver.launches[-1].identity == first.identity
    assert kept is not None and kept.data_ptr() != again.data_ptr()


def test_a_result_that_leaves_is_ordinary_memory(launcher: Launcher, platform: FakePlatform) -> None:
    for plan_key in ("", "key", key.with_facts("always;a problem", [key.ALONE])):
        launcher(planned(plan_key=plan_key))
    assert set(kinds(platform)) == {"staged"}


def test_without_room_the_staged_kernel_runs(
    launcher: Launcher, platform: FakePlatform, fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = planned()
    held = [launcher(call)]
    pool = launcher._resources.groups["0", torch.device("cpu")].workspace.current.results  # type: ignore[union-attr]
    pool._limit_bytes = 0
    blocked = take(pool, blueprint=Blueprint((16 * MIB - 256 * 512,), (1,), torch.bfloat16, torch.device("cpu")))
    held += [launcher(call) for _ in range(2)]
    assert kinds(platform) == ["direct", "staged"] and len(fake_driver.launches) == 3
    assert fake_driver.launches[-1].peer_out[1][0] == 0
    del blocked
    held.append(launcher(call))
    assert kinds(platform) == ["direct", "staged"] and fake_driver.launches[-1].peer_out[1][0] != 0


def test_a_new_workspace_has_new_results_and_old_ones_stay_while_they_are_read(
    launcher: Launcher, platform: FakePlatform
) -> None:
    backing = platform.backing_of_group
    read = launcher(planned())
    assert len(backing.allocated_bytes) == 2 and launcher.held_bytes() == sum(backing.allocated_bytes)
    platform.report(0, op=2, rank=0, peer=1, role=2, code=abi.PEER_TIMEOUT)
    with pytest.raises(Exception, match="waited"):
        launcher(planned())
    launcher(planned())
    workspace, results, *new = backing.allocated_bytes
    assert new == [workspace, results] and launcher.held_bytes() == workspace + 2 * results
    del read
    platform.report(1, op=2, rank=0, peer=1, role=2, code=abi.PEER_TIMEOUT)
    with pytest.raises(Exception, match="waited"):
        launcher(planned())
    launcher(planned(m=128))
    assert launcher.held_bytes() == workspace + results, "nothing was read any more"
    assert len(backing.held) == 2, "and nothing is held by what is not called any more"


def test_results_of_a_group_that_ended_stay_while_they_are_read(
    platform: FakePlatform, fake_driver: FakeDriver
) -> None:
    launcher, held = Launcher(platform, Planned(own_basis, available=PANELS)), platform.backing_of_group.held
    with lone_group():
        read = launcher(planned())
    with lone_group():
        launcher(planned(plan_key="key"))
        assert read is not None and len(held) == 2
        del read
    with lone_group():
        launcher(planned(plan_key="key"))
        assert len(held) == 1


def test_a_capture_uses_what_its_warm_up_has_made(
    launcher: Launcher, platform: FakePlatform, fake_driver: FakeDriver
) -> None:
    platform.fake_streams.capturing = 5
    with pytest.raises(WorkspaceError, match="warm up first"):
        launcher(planned())
    platform.fake_streams.capturing = 0
    launcher(planned())
    platform.fake_streams.capturing = 5
    launcher(planned())
    captured = fake_driver.launches[-1]
    assert captured.is_captured and captured.peer_out[1][0] == PEER
    platform.fake_streams.capturing = 0
    launcher(planned())
    assert fake_driver.launches[-1].peer_out[1][0] != PEER, "the graph's place is its own"


def test_a_capture_without_room_has_been_warmed_up_for_it(
    launcher: Launcher, platform: FakePlatform, fake_driver: FakeDriver
) -> None:
    """All warm-ups had room, so no launch has needed the staged kernel, its workspace or its code so far."""
    launcher(planned())
    workspace = launcher._resources.groups["0", torch.device("cpu")].workspace.current
    assert workspace is not None
    held = take(workspace.results, blueprint=Blueprint((16 * MIB,), (1,), torch.bfloat16, torch.device("cpu")))
    platform.fake_streams.capturing = 5
    launcher(planned())
    assert fake_driver.launches[-1].is_captured and fake_driver.launches[-1].peer_out[1][0] == 0
    assert launcher._resources.groups["0", torch.device("cpu")].workspace.current is workspace
    del held


def test_captures_keep_few_events_of_the_chain(launcher: Launcher, platform: FakePlatform) -> None:
    launcher(planned())
    streams = platform.fake_streams
    for capture in range(1, 33):
        for stream in (7, 8):
            streams.capturing, platform.stream = capture, stream
            launcher(planned(plan_key="key"))
    assert streams.events == 16 and len(set(streams.log)) == 3 * 16, streams.log


def test_a_compiled_chain_needs_two_places_at_a_time(
    launcher: Launcher, platform: FakePlatform, fake_driver: FakeDriver
) -> None:
    """Its generated code lets go of each result when the next one is there, in every run."""
    weights = [torch.ones(64, 64, dtype=torch.bfloat16) for _ in range(4)]

    def chain(x: Tensor) -> Tensor:
        for weight in weights:
            x = all_reduce(x @ weight, "sum", [0, 1])
        return x @ weights[0]

    before = registry._REGISTRY.launcher
    registry.set_launcher(launcher)
    try:
        torch._dynamo.reset()
        compiled = torch.compile(chain, backend="mkernel", options=PLANNED)
        with torch.no_grad():
            for _ in range(3):
                compiled(torch.ones(256, 64, dtype=torch.bfloat16))
    finally:
        registry.set_launcher(before)
    assert set(kinds(platform)) == {"direct", "staged"} and len(fake_driver.launches) == 3 * 4
    places = [block.peer_out[1][0] - PEER for block in fake_driver.launches]
    assert places == [0, 256 * 64 * 2] * 6
