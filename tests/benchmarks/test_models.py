"""The model benchmark: what it selects and resumes, how it judges overlap and tables, and one tiny cell end to end."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.models import command, results, table
from benchmarks.models.blocks import Workload
from benchmarks.models.cell_run import compile_order
from benchmarks.models.cells import MODES, Cell, Selection, units_of
from benchmarks.models.contenders import CollectiveCounter, GraphSwitch
from benchmarks.models.correct import ratios, too_far, truth_of, values_of
from benchmarks.models.look import judged
from benchmarks.models.overlap import Event, least_exposed, overlap_of, union
from benchmarks.models.plan import Plan
from benchmarks.models.queue import Queue
from benchmarks.models.timing import Spread, Visit
from benchmarks.models.worker import Job
from mkcompile.runtime.recorder import TASK, RankTrace
from mkcompile.runtime.trace.instances import LANE, ROLE

TINY = ["--device", "cpu", "--quiet", "--model", "tiny", "--form", "sequence", "--limit-s", "300"]
QUICK = ["--forward-only", "--row-s", "0.1", "--contender", "eager", "--contender", "mkernel"]


def test_a_cell_runs_and_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "build" / "models.jsonl"  # what a CPU gives is not among the results
    assert command.main([*TINY, *QUICK]) == 0
    rows = results.read(out)
    assert [contender for _, contender in rows] == ["eager", "mkernel"]
    ours = list(rows.values())[1]
    assert ours["checked"] and "error" not in ours
    assert ours["operators"] == {"all_gather_gemm": 2, "gemm_reduce_scatter": 2} or sum(ours["operators"].values()) >= 2
    assert 0 < ours["fwd_p10_ms"] <= ours["fwd_ms"] <= ours["fwd_p90_ms"]
    assert "fwdbwd_ms" not in ours
    assert command.main([*TINY, *QUICK]) == 0
    assert "0 of 1 cells" in capsys.readouterr().err
    assert len(out.read_text().splitlines()) == 2


@pytest.mark.slow
def test_checks_alone_train_and_time_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "checks.jsonl"
    arguments = [*TINY, "--checks-only", "--contender", "eager", "--contender", "mkernel", "--out", str(out)]
    assert command.main(arguments) == 0
    ours = list(results.read(out).values())[1]
    assert ours["contender"] == "mkernel" and ours["checked"] and "unfinished" not in ours
    assert len(ours["losses"]) == 20 and ours["losses"][-1] < ours["losses"][0] and ours["losses_from_eager"] < 1e-2
    assert "fwd_ms" not in ours and "fwdbwd_ms" not in ours
    assert command.main(arguments) == 0
    assert "0 of 1 cells" in capsys.readouterr().err


@pytest.mark.slow
def test_whole_models_are_judged_by_fp32(tmp_path: Path) -> None:
    out = tmp_path / "whole.jsonl"
    asked = ["--model", "HF-tiny", "--tokens", "1x1", "--contender", "eager", "--contender", "mkernel"]
    assert command.main(["--device", "cpu", "--checks-only", *asked, "--limit-s", "300", "--out", str(out)]) == 0
    for row in results.read(out).values():
        assert row["checked"] and row["judged_by"] == "fp32" and 0 < row["worst_error"] < 1e-2


def test_the_whole_grid_is_the_baselines() -> None:
    cells = Selection().cells("cuda")
    blocks = [cell for cell in cells if cell.trains]
    assert len(blocks) == 3 * 2 * 4 * 2
    assert len(cells) - len(blocks) == 2 * 4 * 2
    assert [cell.work for cell in cells] == sorted((cell.work for cell in cells), reverse=True), "the longest first"


def test_async_tp_takes_part_where_it_differs() -> None:
    def of(form: str, mode: str, device: str = "cuda") -> tuple[str, ...]:
        cell = Cell(model="8B", form=form, batch=1, tokens=512, mode=mode)
        return cell.contenders(("eager", "inductor", "async_tp", "mkernel"), device)

    assert of("all-reduce", MODES[0]) == ("eager", "inductor", "mkernel")
    assert of("sequence", MODES[0]) == ("eager", "inductor", "async_tp", "mkernel")
    assert of("sequence", MODES[1]) == ("inductor", "async_tp", "mkernel")
    assert "async_tp" not in of("sequence", MODES[0], "cpu")


def test_operators_that_work_in_place_are_counted_too() -> None:
    graph, counter = torch.fx.Graph(), CollectiveCounter()
    x = graph.placeholder("x")
    graph.call_function(torch.ops.mkcompile.gemm_all_reduce.default, (x,))
    graph.call_function(
        torch.ops.higher_order.auto_functionalized_v2, (torch.ops.mkcompile.gemm_all_reduce_add.default,), {"x": x}
    )
    graph.call_function(torch.ops.higher_order.auto_functionalized_v2, (torch.ops.aten.add_.Tensor,), {"self": x})
    counter(graph)
    assert counter.operators == {"gemm_all_reduce": 1, "gemm_all_reduce_add": 1} and not counter.left


def test_cells_come_in_the_order_of_the_patterns() -> None:
    cells = Selection(models=("70B-tp8-local",)).cells("cuda")
    chosen = command.in_order(cells, ["all-reduce 1x2048 reduce", "4x4096 default", "2048"])
    assert [str(cell) for cell in chosen[:3]] == [
        "70B-tp8-local all-reduce 1x2048 reduce-overhead",
        "70B-tp8-local sequence 4x4096 default",
        "70B-tp8-local all-reduce 4x4096 default",
    ]
    assert len(chosen) == len(set(chosen)) == 6
    assert command.in_order(cells, []) == cells


def test_only_what_nothing_is_computed_beside_is_exposed() -> None:
    events = [
        ("kernel", "gemm", 0.0, 10.0),
        ("kernel", "ncclDevKernel_AllReduce", 8.0, 7.0),
        ("kernel", "gemm", 12.0, 2.0),
        ("gpu_memcpy", "Memcpy PtoP", 20.0, 1.0),
    ]
    seen = overlap_of(events)
    assert seen.communication_us == 8.0
    assert seen.exposed_us == 4.0
    assert (seen.span_us, seen.busy_us) == (21.0, 16.0)
    assert seen.kernels[0] == ("gemm", 2, 12.0)
    assert union([(3, 4), (0, 2), (1, 3)]) == [(0, 4)]


def _profiled(exposed: list[float]) -> list[Event]:
    """Steps behind a long sleep and a collective in which the ranks meet; a short sleep is part of each."""
    events: list[Event] = [("kernel", "fill", -50.0, 1.0)]
    for start, us in zip((10_000.0 * step for step in range(len(exposed))), exposed, strict=True):
        events += [("kernel", "spin_kernel", start, 1000.0), ("kernel", "ncclDevKernel_AllReduce", start + 1e3, 500.0)]
        events += [("kernel", "gemm", start + 1500.0, 10.0), ("kernel", "nccl", start + 1510.0, us)]
        events.append(("kernel", "spin_kernel", start + 1500.0, 2.0))
    return events


def test_the_step_that_exposes_least_is_taken_without_the_meeting_in_front_of_it() -> None:
    seen = least_exposed(_profiled([9.0, 4.0, 7.0]))
    assert (seen.exposed_us, seen.span_us) == (4.0, 14.0)
    with pytest.raises(ValueError, match="2 of 3 steps"):
        least_exposed(_profiled([9.0, 4.0]))


def test_a_step_that_took_longer_than_when_it_was_timed_is_doubted() -> None:
    seen = overlap_of([("kernel", "mk_kernel", 0.0, 2000.0)])
    assert seen.doubt(1.8) == "" and seen.doubt(None) == ""
    assert "2000 us under the profiler and 1200 us when it was timed" in seen.doubt(1.2)


def _traces(spans_us: list[float], exposed_us: float, overwritten: int = 0) -> list[RankTrace]:
    """One block computes in each launch but for its first microseconds."""
    tasks = np.zeros(2 * len(spans_us), dtype=TASK)
    for i, span_us in enumerate(spans_us):
        start_ns = 1_000_000 * (i + 1)
        tasks[2 * i : 2 * i + 2]["start_ns"] = start_ns, start_ns + round(1e3 * exposed_us)
        tasks[2 * i : 2 * i + 2]["end_ns"] = start_ns + round(1e3 * span_us)
        tasks[2 * i : 2 * i + 2]["role"] = ROLE["block"], ROLE["mainloop"]
        tasks[2 * i : 2 * i + 2]["lane"] = LANE["compute 0"]
    trace = RankTrace(rank=0, device="", launches=("gemm",), groups=((0, 1),), tasks=tasks, overwritten=overwritten)
    return [trace]


def test_launches_are_trusted_where_they_take_no_longer_than_without_timelines() -> None:
    seen = overlap_of([("kernel", "mk_kernel", 200.0 * i, 100.0) for i in range(2)])
    launches, doubt = judged([_traces([900.0, 100.0], 50.0), _traces([105.0, 95.0], 5.0)], seen)
    assert doubt == "" and sum(one.exposed_us for one in launches) == 10.0
    assert "took 1000 us with timelines and 200 us without" in judged([_traces([900.0, 100.0], 50.0)], seen)[1]
    assert "1 of 2 launches" in judged([_traces([100.0], 5.0)], seen)[1]
    assert "overwritten" in judged([_traces([105.0, 95.0], 5.0, overwritten=3)], seen)[1]


def test_a_tensor_further_off_than_twice_eager_is_named() -> None:
    assert too_far({"y": 0.01}, {"y": 0.005}) == ""
    assert "d x" in too_far({"y": 0.01, "d x": 0.02}, {"y": 0.005, "d x": 0.005})
    assert "y" in too_far({"y": math.inf}, None)


@pytest.mark.parametrize("train", [False, True])
def test_the_truth_of_several_samples_is_that_of_each(train: bool) -> None:
    torch.manual_seed(3)
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8, bias=False))
    x, dy = torch.randn(3, 4, 8, requires_grad=True), torch.randn(3, 4, 8)
    load = Workload(module=module, x=x, dy=dy)
    whole, by_sample = values_of(load, module, train), truth_of(load, train)
    assert list(whole) == list(by_sample)
    torch.testing.assert_close(by_sample, whole)


def test_what_is_not_a_number_is_infinitely_far() -> None:
    got = {"y": torch.tensor([1.0, math.nan]), "z": torch.tensor([3.0, 4.0])}
    found = ratios(got, {"y": torch.ones(2), "z": torch.tensor([3.0, 5.0])})
    assert found["y"] == math.inf
    assert found["z"] == pytest.approx(1 / math.sqrt(34))


def test_a_spread_is_of_the_rounds() -> None:
    spread = Spread.of([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (spread.p10, spread.median, spread.p90) == (1.0, 3.0, 5.0)


def _rows(tmp_path: Path) -> Path:
    path = tmp_path / "models.jsonl"
    cell = {"model": "8B", "form": "sequence", "B": 1, "T": 512, "mode": "default", "device": "GPU", "torch": "2"}
    times = {"eager": 4.0, "inductor": 3.0, "async_tp": None, "mkernel": 2.0}
    rows = [
        {**cell, "contender": name, **({"fwd_ms": ms} if ms else {"error": "RuntimeError: no"})}
        for name, ms in times.items()
    ]
    results.append(path, [{**rows[3], "fwd_ms": 9.0}])
    results.append(path, rows)
    return path


def test_the_last_row_of_a_contender_counts(tmp_path: Path) -> None:
    rows = results.read(_rows(tmp_path))
    (cell,) = table.cells_of(rows)
    assert table.speed_up(rows, cell, "fwd") == 1.5
    assert table.speed_up(rows, cell, "fwdbwd") is None


def test_tables_show_ratios_and_failures(tmp_path: Path) -> None:
    rows = results.read(_rows(tmp_path))
    page = table.page(rows)
    assert "| 4.000 (2.00) | 3.000 (1.50) | fails | 2.000 |" in page
    assert "async TP: RuntimeError: no" in page
    assert "| 8B | sequence | 1x512 | 1.50 |  | none |" in "\n".join(table.summary_table(rows))


def test_what_was_asked_stands_beside_what_was_measured(tmp_path: Path) -> None:
    cell = {
        "model": "70B-tp8-local",
        "form": "sequence",
        "B": 4,
        "T": 4096,
        "mode": "default",
        "device": "",
        "torch": "",
    }
    of_each = {
        "inductor": {"fwd_ms": 16.0, "fwd_peak_bytes": 10**9, "losses": [2.0, 1.0], "compile_cold_fwd_s": 4.0},
        "mkernel": {"fwd_ms": 12.4, "fwd_peak_bytes": 10**9, "losses": [2.0, 1.001], "compile_cold_fwd_s": 5.0},
    }
    path = tmp_path / "models.jsonl"
    results.append(path, [{**cell, "contender": name, **row, "arena_bytes": 5} for name, row in of_each.items()])
    page = table.page(results.read(path))
    assert "forward: 12.5 ms (async TP 13.80, Inductor 15.02) | sequence 12.400 beside 16.000 | met |" in page
    assert "forward + backward: 39.0 ms (async TP 42.43, Inductor 44.69) | - | missed |" in page
    assert "1 of 1 passes | met |" in page and "at most 5.0e-04 of the first loss apart" in page
    compiled = "cold 1.25 of 1, at most 1.25 (70B-tp8-local sequence 4x4096 default) | missed |"
    assert compiled in page and "most: 0.00 GB of 1.07" in page
    ours = {key: row for key, row in results.read(path).items() if key[1] == "mkernel"}
    assert "| sequence 12.400 | met |" in table.page(ours), "nothing stands beside it"


def test_a_row_that_we_lose_or_fail_is_named(tmp_path: Path) -> None:
    path = _rows(tmp_path)
    cell = {"model": "8B", "form": "sequence", "B": 1, "mode": "default", "device": "GPU", "torch": "2"}
    results.append(
        path, [{**cell, "T": 2048, "contender": name, "fwd_ms": ms} for name, ms in (("eager", 1.0), ("mkernel", 2.0))]
    )
    results.append(path, [{**cell, "T": 4096, "contender": "mkernel", "error": "no"}])
    assert "2048 forward 0.50, 1x4096 fails |" in "\n".join(table.summary_table(results.read(path)))
    results.append(path, [{**cell, "T": 4096, "contender": "mkernel", "mode": "reduce-overhead", "error": "no"}])
    assert "2048 forward 0.50, 1x4096 fails, in both modes |" in "\n".join(table.summary_table(results.read(path)))


def test_a_mean_of_some_of_the_sizes_names_them(tmp_path: Path) -> None:
    path = tmp_path / "models.jsonl"
    cell = {"model": "8B", "form": "sequence", "B": 1, "mode": "default", "device": "GPU", "torch": "2"}
    both = {"fwd_ms": 2.0, "fwdbwd_ms": 4.0}
    results.append(path, [{**cell, "T": 512, "contender": "mkernel", **both}])
    results.append(path, [{**cell, "T": 512, "contender": "eager", "fwd_ms": 3.0}])  # its backward pass is missing
    results.append(path, [{**cell, "T": 2048, "contender": "mkernel", **both}])
    results.append(path, [{**cell, "T": 2048, "contender": "eager", "fwd_ms": 3.0, "fwdbwd_ms": 5.0}])
    lines = table.summary_table(results.read(path))
    assert lines[2] == "| 8B | sequence | 1x512, 1x2048 | 1.50 | 1.25 (1x2048) | none |"


def test_modes_stand_side_by_side_and_what_is_behind_says_in_which(tmp_path: Path) -> None:
    path = tmp_path / "models.jsonl"
    cell = {"model": "8B", "form": "sequence", "B": 1, "T": 512, "device": "GPU", "torch": "2"}
    for mode, eager_ms in zip(MODES, (3.0, 1.8), strict=True):
        results.append(path, [{**cell, "mode": mode, "contender": "mkernel", "fwd_ms": 2.0}])
        results.append(path, [{**cell, "mode": mode, "contender": "eager", "fwd_ms": eager_ms}])
    lines = table.summary_table(results.read(path))
    assert "| forward | forward + backward | forward, CUDA graphs | forward + backward, CUDA graphs |" in lines[0]
    assert lines[2:] == ["| 8B | sequence | 1x512 | 1.50 |  | 0.90 |  | 1x512 forward, CUDA graphs 0.90 |"]


def test_an_early_end_leaves_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "models.jsonl"
    cell = Cell(model="8B", form="sequence", batch=1, tokens=512, mode="default")
    key = {"model": "8B", "form": "sequence", "B": 1, "T": 512, "mode": "default"}
    results.append(path, [{**key, "contender": "eager", "fwd_ms": 2.0, "unfinished": True}])
    results.append(path, [{**key, "contender": "mkernel", "fwd_ms": 1.0}])
    rows = results.with_error(cell, ("eager", "inductor", "mkernel"), "died", results.read(path))
    assert [row.get("fwd_ms") for row in rows] == [2.0, None, None], "a whole row of another run is not this run's"
    assert all(row["error"] == "died" and "unfinished" not in row for row in rows)


def test_exposed_time_is_unknown_where_a_part_of_it_is() -> None:
    ours = {"contender": "mkernel", "fwd_between_us": 9.0, "fwdbwd_between_us": 4.0, "fwd_ms": 1.0}
    assert table.exposed_us(ours, "fwd") is None, "what our kernels wait for is inside of them"
    assert table.exposed_us(ours | {"contender": "inductor"}, "fwd") == 9.0
    assert table.exposed_us(ours | {"fwd_inside_us": 2.0}, "fwd") == 11.0
    assert table.exposed_us(ours | {"fwd_inside_us": 2000.0}, "fwd") is None, "a millisecond is all that there is"


def test_what_keeps_its_gpu_busy_warms_it_up_before_it_is_timed() -> None:
    busy, waiting, long = Visit.of(2.0, host_ms=0.5), Visit.of(2.0, host_ms=1.9), Visit.of(150.0, host_ms=1.0)
    assert (busy.heating, busy.chunks, busy.calls) == (50, 3, 15) and busy.seconds == pytest.approx(0.19)
    assert waiting.heating == 0, "the GPU waits for its host"
    assert (long.heating, long.chunks, long.calls) == (1, 2, 1) and long.seconds == pytest.approx(0.45)


def test_who_compiles_first_depends_on_the_cell_but_not_on_its_mode() -> None:
    names = ("eager", "inductor", "mkernel")
    cells = Selection().cells("cuda")
    orders = {cell: compile_order(cell, names) for cell in cells}
    assert all(order[0] == "eager" for order in orders.values())
    assert 8 <= sum(order[1] == "inductor" for order in orders.values()) // 2 <= 24
    assert all(len({tuple(orders[cell]) for cell in unit}) == 1 for unit in units_of(cells, together=True))


def test_a_limit_that_was_too_short_says_what_it_would_take(tmp_path: Path) -> None:
    plan = Plan(
        contenders=(), device="cpu", budget_s=1.0, train=True, compile_times=None, profile=None, quiet=False
    )  # fmt: skip
    units = units_of(Selection().cells("cuda"), together=True)
    job = Job(
        units=units, plan=plan, folder=tmp_path, caches=tmp_path, out=tmp_path, common={}, deadline=0.0, cell_s=40.0
    )  # fmt: skip
    for _ in units[:22]:
        job.queue.take()
    said = command.not_begun(job, num_pairs=6, spent_s=100.0)
    assert "10 of 32 (cells, or both modes of one) were not begun" in said and "--limit-s 180" in said
    for _ in range(16):  # each pair asks once more than there are
        job.queue.take()
    assert command.not_begun(job, num_pairs=6, spent_s=100.0) == ""


def test_a_queue_is_looked_at_without_taking_anything(tmp_path: Path) -> None:
    queue = Queue(tmp_path / "next")
    assert [queue.next(), queue.take(), queue.next(), queue.next(), queue.take()] == [0, 0, 1, 1, 1]


def test_predictions_stand_beside_what_was_measured(tmp_path: Path) -> None:
    said = {"model": "8B", "form": "sequence", "B": 1, "T": 512, "fwd_unfused_ms": 2.5, "fwd_fused_ms": 1.9}
    lines = table.predictions_table(
        results.read(_rows(tmp_path)), [said | {"fwdbwd_unfused_ms": 9, "fwdbwd_fused_ms": 8}]
    )
    assert lines[2:] == ["| 8B | sequence | 1x512 | forward | default | 2.50 / 3.00 | 1.90 / 2.00 |"]


def test_the_readme_keeps_what_is_around_its_table() -> None:
    text = f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n"
    assert table.replaced(text, ["new"]) == f"before\n{table.BEGIN}\nnew\n{table.END}\nafter\n"


def test_rows_survive_a_restart_as_json_lines(tmp_path: Path) -> None:
    path = _rows(tmp_path)
    assert all(isinstance(json.loads(line), dict) for line in path.read_text().splitlines())
    cell = Cell(model="8B", form="sequence", batch=1, tokens=512, mode="default")
    assert results.is_done(cell, ("eager", "mkernel"), results.read(path))
    assert not results.is_done(cell, ("eager", "other"), results.read(path))


def test_both_modes_of_a_size_are_one_unit_where_they_are_compiled_together() -> None:
    cells = command.in_order(Selection(models=("8B",)).cells("cuda"), ["512 reduce", "2048 default", "512 default"])
    assert [len(unit) for unit in units_of(cells, together=True)] == [2, 2, 1, 1]
    assert [cell.mode for cell in units_of(cells, together=True)[0]] == list(MODES)
    assert units_of(cells, together=False) == tuple((cell,) for cell in cells)


def test_what_is_compiled_once_runs_captured_or_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    inductor = importlib.import_module("torch._inductor.compile_fx")
    monkeypatch.setattr(inductor, "cudagraphify", lambda model, **_: lambda inputs: ["captured", *model(inputs)])
    switch = GraphSwitch()
    with switch.installed():
        call = inductor.cudagraphify(lambda inputs: [2 * one for one in inputs], device_index=0)
    assert call([1]) == ["captured", 2]
    with switch.with_timelines():
        assert call([1]) == ["captured", 2] and switch.traced, "captured once more"
    switch.on = False
    assert call([1]) == [2]
