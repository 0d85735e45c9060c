"""Reading timelines: rings, launches, clocks, numbers and files. All data are synthetic."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mkcompile.errors import OptionError
from mkcompile.runtime import abi, trace
from mkcompile.runtime.launcher import Launcher
from mkcompile.runtime.recorder import RankTrace, Recorder, parse
from mkcompile.runtime.trace.clocks import align
from mkcompile.runtime.trace.exposed import covered_ns, summary
from mkcompile.runtime.trace.file import Timeline, read, write
from mkcompile.runtime.trace.instances import LANE, ROLE, instances

from .fakes import FakeDriver, FakePlatform
from .synthetic_trace import EPILOGUE_NS, NUM_BLOCKS, TILE_NS, TILES, rank_trace, ring_bytes


def test_rings_are_read_in_the_order_of_writing() -> None:
    made = rank_trace(0, 0).tasks
    tasks, overwritten = parse(ring_bytes(made, NUM_BLOCKS, 64), NUM_BLOCKS, 64)
    assert overwritten == 0 and len(tasks) == len(made)
    assert np.array_equal(np.sort(tasks), np.sort(made))
    of_lane = tasks[(tasks["block"] == 1) & (tasks["lane"] == 0)]
    assert np.all(np.diff(of_lane["start_ns"].astype(np.int64)) > 0)


def test_full_rings_keep_the_newest() -> None:
    made = rank_trace(0, 0, epochs=5).tasks
    tasks, overwritten = parse(ring_bytes(made, NUM_BLOCKS, 8), NUM_BLOCKS, 8)
    assert overwritten == len(made) - len(tasks) > 0
    assert tasks["start_ns"].max() == made["start_ns"].max()
    assert len(tasks[(tasks["block"] == 0) & (tasks["lane"] == 0)]) == 8


def test_tasks_are_given_to_their_launches() -> None:
    found = instances(rank_trace(0, 0, epochs=3))
    assert [one.epoch for one in found] == [1, 2, 3]
    for one in found:
        assert (one.tasks["role"] == ROLE["mainloop"]).sum() == NUM_BLOCKS * TILES * 2
        assert one.tasks["start_ns"].min() >= one.start_ns


def test_tasks_whose_launch_was_overwritten_are_dropped() -> None:
    made = rank_trace(0, 0, epochs=2)
    tasks = made.tasks[~((made.tasks["role"] == ROLE["block"]) & (made.tasks["tile"] == 1))]
    found = instances(replace(made, tasks=tasks))
    assert [one.epoch for one in found] == [2]
    assert len(found[0].tasks) < len(tasks)


def test_equal_launches_are_kept_apart_where_one_block_has_forgotten_more() -> None:
    made = rank_trace(0, 0, epochs=3)
    stays = made.tasks["role"] == ROLE["block"]
    forgotten = stays & (made.tasks["block"] == 0) & (made.tasks["tile"] < 3)
    made.tasks["tile"][stays] = 0  # as of a kernel of one rank, which has no epochs
    (newest,) = instances(replace(made, tasks=made.tasks[~forgotten]))
    assert (newest.tasks["role"] == ROLE["load"]).sum() == NUM_BLOCKS * TILES


def test_a_launch_that_seems_to_end_in_the_next_is_left_out() -> None:
    made = rank_trace(0, 0, epochs=3)
    second = (made.tasks["role"] == ROLE["block"]) & (made.tasks["tile"] == 2)
    made.tasks["end_ns"][second] += 100_000
    assert [one.epoch for one in instances(made)] == [1, 3]


@pytest.mark.parametrize("ahead_ns", [0, 5_000_000, -123_456])
def test_clocks_are_found_from_flags(ahead_ns: int) -> None:
    clocks = align([rank_trace(0, 0), rank_trace(1, ahead_ns, late_ns=300)])
    assert clocks[0].offset_ns == clocks[0].within_ns == 0
    assert clocks[1].within_ns is not None and clocks[1].within_ns < 12_000
    assert abs(clocks[1].offset_ns + ahead_ns) <= clocks[1].within_ns


def entered_only(made: RankTrace, ahead_ns: int, entered_ns: tuple[int, int]) -> RankTrace:
    """Of all flags only those with which a launch begins: sent at these true times, and waited for by this rank."""
    tasks = made.tasks[~np.isin(made.tasks["role"], [ROLE["signal"], ROLE["receive"]])]
    mine = entered_ns[made.rank] + ahead_ns
    seen = max(mine, entered_ns[1 - made.rank] + ahead_ns + 1_400)
    rows = np.zeros(2, dtype=tasks.dtype)
    rows["role"], rows["lane"] = (ROLE["signal"], ROLE["receive"]), (LANE["entry"], LANE["signal"])
    rows["tile"], rows["owner"] = abi.NO_TILE, (made.rank, 1 - made.rank)
    rows["start_ns"], rows["end_ns"], rows["waited_ns"] = mine, (mine + 100, seen), (0, seen - mine)
    return replace(made, tasks=np.concatenate([tasks, rows]))


@pytest.mark.parametrize("late", [0, 1])
def test_a_wait_for_a_late_rank_tells_the_clocks_of_both(late: int) -> None:
    late_ns, ahead_ns = 150_000, 40_000
    entered = 1_100_000 + late_ns * (late == 0), 1_100_000 + late_ns * (late == 1)
    first = entered_only(rank_trace(0, 0, epochs=1, late_ns=late_ns * (late == 0)), 0, entered)
    second = entered_only(rank_trace(1, ahead_ns, epochs=1, late_ns=late_ns * (late == 1)), ahead_ns, entered)
    clock = align([first, second])[1]
    assert clock.within_ns is not None and clock.within_ns <= 1_300
    assert abs(clock.offset_ns + ahead_ns) <= clock.within_ns


def test_clocks_without_flags_are_said_to_be_unknown() -> None:
    made = rank_trace(1, 777_000)
    silent = replace(made, tasks=made.tasks[made.tasks["role"] != ROLE["signal"]])
    clocks = align([rank_trace(0, 0), silent])
    assert clocks[1].within_ns is None and clocks[1].offset_ns == -777_000


def test_exposed_time_is_what_no_block_computes() -> None:
    (first, _) = summary(rank_trace(0, 0))
    stay_us = (1_000 + TILES * (TILE_NS + EPILOGUE_NS) + 3_000 + 10 * (NUM_BLOCKS - 1)) / 1000
    assert first.operator == "gemm_reduce_scatter" and first.num_blocks == NUM_BLOCKS
    assert first.span_us == pytest.approx(stay_us)
    assert first.computing_us + first.exposed_us == pytest.approx(first.span_us)
    # the beginning, the end, and the first wait of each tile in all blocks at once
    assert 4.0 < first.exposed_us < 4.0 + TILES * 0.6 + 0.2
    assert first.compute_wait_us == pytest.approx(TILES * 0.6)
    assert 0.8 < first.busy_share < 1.0


def test_union_of_intervals() -> None:
    starts, ends = np.array([0, 5, 20]), np.array([10, 8, 30])
    assert covered_ns(starts, ends) == 20
    assert covered_ns(starts[:0], ends[:0]) == 0


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_file_reads_back_as_it_was_written(name: str, tmp_path: Path) -> None:
    timeline = Timeline.of([rank_trace(0, 0), rank_trace(1, 40_000)], synthetic=True)
    write(timeline, tmp_path / name)
    again = read(tmp_path / name)
    assert again.clocks == timeline.clocks and again.synthetic
    for one, other in zip(timeline.traces, again.traces, strict=True):
        assert np.array_equal(np.sort(one.tasks), np.sort(other.tasks))
        assert replace(one, tasks=other.tasks) == other


def test_perfetto_finds_ranks_blocks_operators_and_waits(tmp_path: Path) -> None:
    write(Timeline.of([rank_trace(0, 0), rank_trace(1, 40_000)], synthetic=True), tmp_path / "t.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))["traceEvents"]
    names = {(event["name"], event["args"]["name"]) for event in events if event["name"].endswith("_name")}
    assert ("process_name", "rank 1 (synthetic, synthetic)") in names
    assert {("thread_name", "launches"), ("thread_name", "block 003 compute 1")} <= names
    slices = [event for event in events if event["ph"] == "X"]
    assert min(event["ts"] for event in slices) == 0
    launches = [event for event in slices if event["cat"] == "launch"]
    assert {event["name"] for event in launches} == {"gemm_reduce_scatter"} and len(launches) == 4
    waits = [event for event in slices if event["name"] == "wait"]
    assert len(waits) > 0 and all(event["dur"] >= 0.2 for event in waits)
    assert {event["cat"] for event in slices} == {"launch", "gemm_reduce_scatter", "wait"}


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    with pytest.raises(OptionError, match=r"other\.json is no timeline"):
        read(tmp_path / "other.json")


def test_recorder_marks_launches_by_what_they_are() -> None:
    recorder = Recorder(device=torch.device("cpu"), num_blocks=2, records=4)
    packed = [abi.aligned_block(abi.KernelArguments) for _ in range(3)]
    for one, text in zip(packed, ("a", "b", "a"), strict=True):
        recorder.stamp(one, text, (0, 1))
    assert [one.trace_launch for one in packed] == [0, 1, 0]
    assert packed[0].trace_blocks == 2 and packed[0].trace_records == 4 and packed[0].trace != 0
    assert recorder.read(rank=1).launches == ("a", "b")
    assert len(recorder.read(rank=1).tasks) == 0


@pytest.mark.parametrize("records", [8, 64])
def test_a_recorder_reads_what_was_written_and_no_more(records: int) -> None:
    """As the whole memory would be read: rings that are full, and rings that are mostly empty."""
    made = ring_bytes(rank_trace(0, 0, epochs=3).tasks, NUM_BLOCKS, records)
    recorder = Recorder(device=torch.device("cpu"), num_blocks=NUM_BLOCKS, records=records)
    recorder._memory.copy_(torch.from_numpy(made))
    whole, overwritten = parse(made, NUM_BLOCKS, records)
    found = recorder.read(rank=0)
    assert np.array_equal(found.tasks, whole) and found.overwritten == overwritten
    assert (overwritten > 0) == (records == 8)


def test_launcher_traces_only_where_it_is_told_to(fake_driver: FakeDriver, platform: FakePlatform) -> None:
    from .fakes import lone_group
    from .test_launcher import all_reduce

    with lone_group():
        traced = Launcher(platform, trace=True)
        traced(all_reduce())
        assert platform.loaded[-1].trace and fake_driver.launches[-1].trace != 0
        (found,) = traced.traces(rank=0)
        assert found.launches[0].startswith("gemm_all_reduce") and found.groups == ((0, 1),)
        plain = Launcher(platform)
        plain(all_reduce())
        assert not platform.loaded[-1].trace and fake_driver.launches[-1].trace == 0
        assert plain.traces(rank=0) == []
    assert trace.collect() == []
