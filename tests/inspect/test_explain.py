"""What `explain` says of models, and that it changes nothing."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import mkcompile
from mkcompile.config import Options
from mkcompile.errors import GroupError, OptionError
from mkcompile.inspect import examples, unbuilt
from mkcompile.inspect.capture import compiled_with
from mkcompile.inspect.console import print_report
from mkcompile.inspect.explain import Request, explain_layers, explain_request
from mkcompile.inspect.findings import NO_COLLECTIVE
from mkcompile.inspect.offline import fake_world
from mkcompile.inspect.predict import planner_for
from mkcompile.inspect.report import Report
from mkcompile.passes.reason import Reason
from mkcompile.plan.kernels import AVAILABLE
from tests.inspect.models import Broken, ByHand, sequence_parallel_mlp, tensor_parallel_mlp

ALWAYS = {"mkernel.fuse": "always"}


def outcome(report: Report) -> list[tuple[str, str, str | None]]:
    return [(one.phase, one.kind, one.operator) for one in report.collectives]


def test_collectives_of_forward_and_backward_become_operators(tensor_report: Report) -> None:
    assert outcome(tensor_report) == [
        ("forward", "all_reduce", "gemm_all_reduce"),
        ("backward", "all_reduce", "gemm_all_reduce"),
    ]
    (forward, backward) = tensor_report.collectives
    assert (forward.world_size, forward.dtype, forward.shape) == (4, "bf16", ("1", "4096", "4096"))
    assert forward.problem is not None and forward.problem.k == 4 * 4096 // 4
    assert backward.site == forward.site + 1


def test_every_collective_of_the_graphs_has_a_row(sequence_report: Report) -> None:
    in_graphs = sum(node.role == "collective" for pair in sequence_report.graphs for node in pair.before.nodes)
    assert in_graphs == len(sequence_report.collectives) + sequence_report.folded == 4


def test_sent_bytes_follow_from_the_shape(sequence_report: Report) -> None:
    whole_bytes = 4096 * 4096 * 2
    assert {one.sent_bytes for one in sequence_report.collectives} == {whole_bytes * 3 // 4}


def test_predictions_are_there_and_in_order(sequence_report: Report) -> None:
    for one in sequence_report.collectives:
        assert one.estimate is not None and one.estimate.fused_s is not None
        assert 0 < one.estimate.fused_s < one.estimate.unfused_s
        assert one.estimate.decision == "fuse"
    assert sequence_report.totals.saving_s > 0


def test_measured_times_are_shown_where_the_site_was_tuned(
    sequence_report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mkcompile.inspect import predict
    from mkcompile.plan.buckets import entry_name
    from mkcompile.plan.decide import decide, unfused_plan
    from mkcompile.plan.disk import Measured, Results

    planner = predict.planner_for(Options(topology="8xh200"))
    problem = sequence_report.collectives[0].problem
    assert problem is not None and planner.predict(problem).measured_fused_s is None
    tuned = Results()
    tuned.add(entry_name(problem), Measured(plan=decide(problem, planner.topology).plan, seconds=0.25))
    tuned.add(entry_name(problem), Measured(plan=unfused_plan(problem, planner.topology), seconds=0.5))
    monkeypatch.setattr(predict, "load_results", lambda topology: tuned)
    found = predict.planner_for(Options(topology="8xh200")).predict(problem)
    assert (found.measured_unfused_s, found.measured_fused_s) == (0.5, 0.25)


def test_nothing_is_fused_under_never_and_the_graph_stays(world: None) -> None:
    model, args = tensor_parallel_mlp()
    report = explain_request(Request(model=model, args=args, options={"mkernel.fuse": "never"}))
    assert {one.reason for one in report.collectives} == {Reason.POLICY_NEVER}
    assert "mkernel.fuse" in report.collectives[0].why
    assert not any(node.role == "fused" for pair in report.graphs for node in pair.after.nodes)


def test_a_machine_that_is_not_here_is_planned_with_the_kernels_that_exist(tensor_report: Report) -> None:
    """Each has a plan of one of them, and the note alone speaks of what others would gain."""
    for row in tensor_report.collectives:
        assert row.estimate is not None and row.estimate.decision == "fuse"
        assert f"{row.operator}/{row.estimate.plan.split()[0]}" in AVAILABLE
    (note,) = tensor_report.notes
    assert note.startswith("kernels that do not exist yet (gemm_all_reduce/") and "at sites 1, 2:" in note
    planner = planner_for(Options(topology="8xh200"))
    kept = [replace(one, operator=None, reason=Reason.NO_GAIN) for one in tensor_report.collectives]
    assert "at sites 1, 2:" in unbuilt.notes_on(kept, planner)[0]
    assert unbuilt.notes_on([replace(one, reason=Reason.LAYOUT) for one in kept], planner) == []
    every = replace(planner, policy=replace(planner.policy, available=None))
    assert unbuilt.notes_on(tensor_report.collectives, every) == []


def test_a_planner_refusal_keeps_its_prediction(world: None) -> None:
    report = mkcompile.explain(ByHand(), torch.ones(4, 16), options={"mkernel.topology": "8xh200"})
    kept = report.collectives[0]
    assert kept.reason is Reason.DTYPE and kept.dtype == "f32"
    assert kept.estimate is not None and kept.estimate.decision.startswith("keep")


def test_a_gather_by_a_hook_of_the_compiled_module_is_pointed_out(world: None) -> None:
    model, args = sequence_parallel_mlp()
    report = mkcompile.explain(model.held, *args)
    assert report.collectives[0].reason is Reason.NO_GEMM
    (note,) = report.notes
    assert "all_gather_into_tensor (site 1) ends its graph" in note and "compile a module that holds this one" in note


def test_a_model_without_collectives_says_so() -> None:
    report = mkcompile.explain(nn.Linear(4, 4), torch.ones(2, 4))
    assert report.collectives == () and report.notes == (NO_COLLECTIVE,)


def test_a_compiled_module_is_explained_as_it_was_compiled(world: None) -> None:
    compiled = torch.compile(ByHand(), backend="mkernel", options=ALWAYS)
    report = mkcompile.explain(compiled, torch.ones(4, 16))
    assert outcome(report)[0][2] == "gemm_all_reduce" and report.options == "mkernel.fuse=always"
    kept = mkcompile.explain(compiled, torch.ones(4, 16), options={"mkernel.fuse": "never"})
    assert kept.collectives[0].reason is Reason.POLICY_NEVER
    assert compiled_with(torch.compile(ByHand(), backend="mkernel", mode="max-autotune")) == (None, "max-autotune")
    assert compiled_with(torch.compile(ByHand(), options={"max_autotune": True})) == (None, None)


def compiled_in_place(model: nn.Module, **options: Any) -> nn.Module:
    model.compile(backend="mkernel", **options)
    return model


def test_what_was_compiled_in_place_or_as_a_function_is_too(world: None) -> None:
    model = ByHand()
    by_function = torch.compile(lambda x: model(x), backend="mkernel", options=ALWAYS)
    for compiled in (compiled_in_place(ByHand(), options=ALWAYS), by_function):
        report = mkcompile.explain(compiled, torch.ones(4, 16))
        assert outcome(report)[0][2] == "gemm_all_reduce" and report.options == "mkernel.fuse=always"
    assert compiled_with(compiled_in_place(ByHand(), mode="max-autotune")) == (None, "max-autotune")
    assert compiled_with(compiled_in_place(ByHand())) == compiled_with(ByHand()) == (None, None)


def test_real_weights_their_gradients_and_results_are_left_alone(world: None) -> None:
    model, x = ByHand(), torch.ones(4, 16)
    before = model.down.weight.detach().clone()
    report = mkcompile.explain(model, x, options=ALWAYS)
    assert outcome(report)[0] == ("forward", "all_reduce", "gemm_all_reduce")
    assert torch.equal(model.down.weight, before) and model.down.weight.grad is None


def test_a_second_call_sees_what_the_first_saw(world: None) -> None:
    model, x = ByHand(), torch.ones(4, 16)
    assert outcome(mkcompile.explain(model, x)) == outcome(mkcompile.explain(model, x)) != []


def test_inference_has_one_graph(world: None) -> None:
    with torch.no_grad():
        report = mkcompile.explain(ByHand(), torch.ones(4, 16))
    assert [pair.phase for pair in report.graphs] == ["inference"]


def test_meta_weights_stay_on_meta(world: None) -> None:
    model, args = tensor_parallel_mlp()
    weights = dict(model.named_parameters())
    mkcompile.explain(model, *args)
    assert all(model.get_parameter(name) is one and one.device.type == "meta" for name, one in weights.items())


def test_a_break_at_a_collective_names_line_gemm_and_remedy(world: None) -> None:
    report = mkcompile.explain(Broken(), torch.ones(4, 16))
    assert not report.collectives and not report.notes
    (first,) = report.breaks
    assert first.at_collective and first.gemm
    assert first.code == "work = dist.all_reduce(y_SD, async_op=True)" and first.file.endswith("models.py")
    assert "leave out async_op=True" in first.sentence and first.gemm in first.sentence


def test_an_unknown_option_is_an_error() -> None:
    with pytest.raises(OptionError, match=r"mkernel\.fuze"):
        mkcompile.explain(nn.Linear(4, 4), torch.ones(2, 4), options={"mkernel.fuze": "auto"})


def test_a_fake_world_beside_a_real_one_is_an_error(world: None) -> None:
    with pytest.raises(GroupError, match="exists already"), fake_world(2):
        pass


def test_the_report_is_json(tensor_report: Report) -> None:
    values = json.loads(json.dumps(tensor_report.to_dict()))
    assert values["totals"]["operators"] == 2
    assert any("mkcompile.gemm_all_reduce" in line for line in values["graphs"][0]["after"])
    assert any("all_reduce" in line for line in values["graphs"][0]["before"])


def test_layers_are_extrapolated_from_two() -> None:
    class Stack(nn.Module):
        def __init__(self, layers: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(ByHand() for _ in range(layers))
            self.pad = nn.Linear(8, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = self.pad(block(x))
            return x

    with fake_world(4), torch.no_grad():
        report = explain_layers(lambda layers: Request(model=Stack(layers), args=(torch.ones(4, 16),)), 80)
    assert report.totals.collectives == 2
    assert report.extrapolation is not None and report.extrapolation.total.collectives == 80


@pytest.mark.parametrize("name", ["sequence_parallel_block", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_70b_layer_is_planned_without_weights(name: str) -> None:
    if name == "llama":
        pytest.importorskip("transformers")
    with fake_world(8):
        model, args, kwargs = getattr(examples, name)("70b")
        request = Request(model=model, args=args, kwargs=kwargs, options={"mkernel.topology": "8xh200"})
        report = explain_request(request)
    assert report.capture_s < 60
    assert len(report.fused()) >= (8 if name == "sequence_parallel_block" else 4)
    assert report.totals.step_fused_s < report.totals.step_unfused_s


def test_in_a_narrow_terminal_no_name_is_cut(tensor_report: Report) -> None:
    text = io.StringIO()
    print_report(tensor_report, Console(file=text, width=80))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "\u2026" not in text.getvalue()
    assert all(
        one.kind in text.getvalue() and str(one.operator or "kept") in text.getvalue()
        for one in tensor_report.collectives
    )
