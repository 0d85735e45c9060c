"""The model benchmark: what it selects and resumes, how it judges overlap and tables, and one tiny cell end to end."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.models import command, results, table
from benchmarks.models.blocks import Workload
from benchmarks.models.cells import MODES, Cell, Selection, units_of
from benchmarks.models.contenders import GraphSwitch
from benchmarks.models.correct import ratios, too_far, truth_of, values_of
from benchmarks.models.overlap import least_exposed, overlap_of, union
from benchmarks.models.timing import Spread

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


def test_of_the_steps_after_the_first_two_the_one_that_exposes_least_is_taken() -> None:
    exposed = [9.0, 0.0, 5.0, 3.0, 8.0, 7.0]  # in the first two the ranks meet
    starts = [100.0 * step for step in range(len(exposed))]
    events = [("kernel", "gemm", start, 10.0) for start in starts]
    events += [("kernel", "nccl", start + 10.0, 1.0 + us) for start, us in zip(starts, exposed, strict=True)]
    events.append(("kernel", "fill", -50.0, 1.0))  # before the first step
    assert least_exposed(events).exposed_us == 4.0


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
    assert "default cold 1.25 | missed |" in page and "most: 0.00 GB of 1.07" in page
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


def test_a_graph_exposes_inside_of_kernels_what_they_expose_without() -> None:
    def key(mode: str) -> tuple[tuple[str, str, int, int, str], str]:
        return ("8B", "sequence", 1, 512, mode), "mkernel"

    rows = {key(MODES[0]): {"fwd_between_us": 9.0, "fwd_inside_us": 2.0}, key(MODES[1]): {"fwd_between_us": 4.0}}
    assert table.exposed_us(rows, key(MODES[0]), "fwd") == 11.0
    assert table.exposed_us(rows, key(MODES[1]), "fwd") == 6.0
    assert table.exposed_us(rows, key(MODES[1]), "fwdbwd") is None


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
    switch.on = False
    assert call([1]) == [2]
