"""The predicted step obeys what a stream and a link can do."""

from __future__ import annotations

import io
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from mkcompile.inspect.explain import Request, explain_request
from mkcompile.inspect.offline import fake_world
from mkcompile.inspect.report import Report
from mkcompile.inspect.timeline import Timeline
from tests.inspect.models import tensor_parallel_mlp


def both(report: Report) -> list[Timeline]:
    assert report.timelines is not None
    return [report.timelines.unfused, report.timelines.fused]


def test_a_lane_does_one_thing_at_a_time(tensor_report: Report, sequence_report: Report) -> None:
    for one in (*both(tensor_report), *both(sequence_report)):
        for lane in ("compute", "link"):
            bars = [bar for bar in one.bars if bar.lane in (lane, "both")]
            assert all(first.end_s <= second.start_s + 1e-12 for first, second in pairwise(bars))


def test_a_kernel_starts_after_its_inputs(sequence_report: Report) -> None:
    unfused, _ = both(sequence_report)
    for index, pair in enumerate(sequence_report.graphs):
        bars = {bar.node: bar for bar in unfused.bars if bar.graph == index}
        for node in pair.before.nodes:
            for name in node.inputs:
                if name in bars and node.name in bars:
                    assert bars[name].end_s <= bars[node.name].start_s + 1e-12


def test_fused_operators_take_what_the_planner_predicts(sequence_report: Report) -> None:
    _, fused = both(sequence_report)
    bars = [bar for bar in fused.bars if bar.lane == "both"]
    predicted = {one.site: one.estimate.fused_s for one in sequence_report.collectives if one.estimate}
    assert {bar.site: pytest.approx(bar.end_s - bar.start_s) for bar in bars} == predicted


def test_gemms_and_collectives_take_time_and_views_do_not(tensor_report: Report) -> None:
    unfused, _ = both(tensor_report)
    roles = {bar.role for bar in unfused.bars}
    assert {"gemm", "collective"} <= roles and not roles & {"view", "wait", "input", "output"}
    assert all(bar.end_s > bar.start_s for bar in unfused.bars)


def test_the_step_gain_is_the_difference_of_the_ends(tensor_report: Report) -> None:
    totals, (unfused, fused) = tensor_report.totals, both(tensor_report)
    assert totals.saving_s == pytest.approx(unfused.end_s - fused.end_s)
    assert 0 < totals.saving_s < totals.step_unfused_s


def test_an_operator_without_a_kernel_saves_nothing(tmp_path: Path) -> None:
    with fake_world(4):
        model, args = tensor_parallel_mlp(width=256, tokens=64)
        options = {"mkernel.topology": "8xh200", "mkernel.fuse": "always"}
        report = explain_request(Request(model=model.float(), args=tuple(one.float() for one in args), options=options))
    estimates = [one.estimate for one in report.collectives if one.fused and one.estimate]
    assert estimates and all(one.fused_s is None and one.saving_s == 0 for one in estimates)
    assert report.totals.fused_s == report.totals.unfused_s > 0
    unfused, fused = both(report)
    assert report.totals.saving_s == 0 and not any(bar.lane == "both" for bar in fused.bars)
    assert fused.end_s == unfused.end_s > 0
    console = Console(file=io.StringIO(), width=120)
    report.print(console)
    said = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "by reference #1 #2: no kernel for this dtype" in said and "(0.0% saved)" in said
    page = report.to_html(tmp_path / "page.html").read_text("utf-8")
    assert "runs as its reference, GEMM and then collective: no kernel for this dtype" in page
