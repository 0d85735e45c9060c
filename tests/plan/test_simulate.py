"""Simulated steps: the engine, sizes of models, agreement with measured models, layouts of all kinds."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from mkcompile.errors import OptionError
from mkcompile.plan import PRESETS, Policy, Refusal, preset
from mkcompile.plan.simulate import MODELS, Layout, Workload, main, model, scaling, simulate, sweep
from mkcompile.plan.simulate.engine import Task, run
from mkcompile.plan.simulate.sweep import parse_site

MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "2xh200" / "models-baseline.json"
BLOCKS = {
    "8B": replace(model("llama3-8b"), num_layers=4, vocab=16),
    "70B": replace(model("llama3-70b"), num_layers=2, vocab=16),
    "70B-tp8-local": replace(
        model("llama3-70b"), num_layers=2, vocab=16, intermediate=7168, num_heads=16, num_kv_heads=2
    ),
}


def task(stream: str, seconds: float, after: tuple[int, ...] = (), **loads: float) -> Task:
    return Task(name=stream, stream=stream, seconds=seconds, after=after, loads=loads)


def test_streams_keep_their_order_and_wait_for_each_other() -> None:
    events = run([task("a", 1), task("a", 2), task("b", 5, after=(0,)), task("a", 1, after=(2,))])
    assert [(event.start_s, event.end_s) for event in events] == [(0, 1), (1, 3), (1, 6), (6, 7)]


def test_tasks_that_ask_for_more_than_a_link_has_slow_down() -> None:
    events = run([task("a", 2, link=1.0), task("b", 1, link=1.0)])
    # both at half speed until b is done at 2, then a alone
    assert events[1].end_s == pytest.approx(2)
    assert events[0].end_s == pytest.approx(3)
    apart = run([task("a", 2, link=0.5), task("b", 1, link=0.5)])
    assert [event.end_s for event in apart] == [2, 1]


def test_a_circle_of_waits_is_an_error() -> None:
    with pytest.raises(ValueError, match="wait for ever"):
        run([task("a", 1, after=(1,)), task("b", 1, after=(0,))])


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 10)), min_size=1, max_size=20))
def test_step_is_at_least_the_longest_stream(pairs: list[tuple[str, float]]) -> None:
    events = run([task(stream, seconds, link=0.6) for stream, seconds in pairs])
    longest = max(sum(s for stream, s in pairs if stream == one) for one in "abc")
    assert max(event.end_s for event in events) >= longest * (1 - 1e-9)
    assert max(event.end_s for event in events) <= sum(s for _, s in pairs) * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama3-8b", 8.03), ("llama3-70b", 70.6), ("llama3-405b", 405.9), ("mixtral-8x7b", 46.7), ("deepseek-v3", 671)],
)
def test_models_have_as_many_parameters_as_their_cards_say(name: str, billions: float) -> None:
    assert MODELS[name].num_params / 1e9 == pytest.approx(billions, rel=0.005)


def measured_rows(graphs: bool) -> list[dict[str, object]]:
    """Rows that the GPU and not the host decides: thousands of tokens, or CUDA graphs."""
    rows = json.loads(MEASURED.read_text())["rows"]
    least = 2048 if graphs else 4096
    return [r for r in rows if r["mode"] == "inductor" and r["cudagraphs"] == graphs and r["T"] >= least]


@pytest.mark.parametrize("graphs", [False, True])
def test_unfused_models_take_about_as_long_as_measured(graphs: bool) -> None:
    rows = measured_rows(graphs)
    assert len(rows) >= 6
    for row in rows:
        layout = Layout(tensor=2, sequence=bool(row["sp"]))
        for column, train, limit in (("fwd_ms", False, 0.12), ("fwdbwd_ms", True, 0.20)):
            if row.get(column) is None:
                continue
            load = Workload(batch=int(str(row["B"])), tokens=int(str(row["T"])), train=train)
            step = simulate(BLOCKS[str(row["model"])], "2xh200", layout, load).rows[0]
            assert step.unfused_s * 1e3 == pytest.approx(float(str(row[column])), rel=limit), (row, column)


LAYOUTS = {
    "one GPU": ("llama3-8b", "2xh200", Layout()),
    "TP with all-reduce": ("llama3-70b", "8xh200", Layout(tensor=8, sequence=False)),
    "TP and SP": ("llama3-70b", "8xh200", Layout(tensor=8)),
    "CP over nodes": ("llama3-70b", "2x8xh200", Layout(tensor=8, context=2)),
    "CP inside a node": ("llama3-8b", "8xh200", Layout(tensor=2, context=4)),
    "DP replicated": ("llama3-8b", "8xh200", Layout(tensor=2, data=4, sharded=False)),
    "FSDP over nodes": ("llama3-405b", "16x8xh200", Layout(tensor=8, data=16)),
    "EP in a node": ("mixtral-8x7b", "8xh200", Layout(data=8, expert=8)),
    "EP over nodes": ("deepseek-v3", "16x8xh200", Layout(tensor=2, data=64, expert=128)),
    "EP in a rack": ("deepseek-v3", "gb200nvl72", Layout(data=64, expert=64)),
    "all of them": ("deepseek-v3", "16x8xh200", Layout(tensor=4, context=2, data=16, expert=64)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_gives_a_step_that_fusing_does_not_slow(name: str) -> None:
    of, topology, layout = LAYOUTS[name]
    one = replace(model(of), num_layers=4)
    step = simulate(one, topology, layout).rows[0]
    assert 0 < step.compute_s <= step.unfused_s * (1 + 1e-9)
    assert step.fused_s <= step.unfused_s * (1 + 1e-9)
    assert step.exposed_fused_s <= step.exposed_unfused_s
    assert (step.speed_up > 1.02) == (
        name not in ("one GPU", "DP replicated", "FSDP over nodes") or step.speed_up > 1.02
    )


def test_feed_forward_networks_are_planned_whole_where_that_is_faster() -> None:
    """And then stand beside what they replace, their parts with the activation between them."""
    all_reduced = Layout(tensor=8, sequence=False)
    load = Workload(tokens=16, train=False)
    few = simulate(replace(model("llama3-70b"), num_layers=2), "8xh200", all_reduced, load, policy=Policy())
    found = {one.operator: one for one in few.rows[0].operators}
    assert found["ffn"].sites == 2 and found["ffn"].fused_s < found["ffn"].unfused_s
    many = simulate(replace(model("llama3-70b"), num_layers=2), "8xh200", workload=Workload(tokens=32768, train=False))
    for row in (few.rows[0], many.rows[0]):
        apart = sum(one.unfused_s - one.fused_s for one in row.operators)
        assert row.unfused_s - row.fused_s == pytest.approx(apart, rel=0.02), "the step saves what its operators save"


def test_what_has_no_kernel_is_planned_for_those_who_ask_only() -> None:
    few, load = replace(model("llama3-70b"), num_layers=2), Workload(tokens=16, train=False)
    ours, all_known = (
        simulate(few, "8xh200", Layout(tensor=8, sequence=False), load, **policy).rows[0].operators
        for policy in ({}, {"policy": Policy()})
    )
    assert {f"{one.operator}/{one.variant}" for one in ours} == {"gemm_all_reduce/stream"}
    assert "ffn" in {one.operator for one in all_known}
    site = parse_site("ffn:16x8192x8192x3584", 8)
    assert sweep([site], preset("8xh200")).decisions[0].refusal is Refusal.NO_KERNEL
    assert sweep([site], preset("8xh200"), Policy()).decisions[0].refusal is None


def test_one_gpu_exposes_nothing() -> None:
    step = simulate(replace(model("llama3-8b"), num_layers=2), "2xh200", Layout()).rows[0]
    assert step.exposed_unfused_s == pytest.approx(0, abs=1e-9)
    assert step.speed_up == pytest.approx(1)
    assert step.operators == ()


def test_never_is_the_unfused_step() -> None:
    step = simulate(BLOCKS["8B"], "2xh200", Layout(tensor=2), policy=Policy(fuse="never")).rows[0]
    assert step.fused_s == step.unfused_s


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 4), st.sampled_from([512, 1024, 2048, 4096]), st.booleans())
def test_more_tokens_take_longer(batch: int, tokens: int, train: bool) -> None:
    def step_s(load: Workload) -> float:
        return simulate(BLOCKS["8B"], "2xh200", Layout(tensor=2), load).rows[0].unfused_s

    assert step_s(Workload(batch=batch, tokens=2 * tokens, train=train)) > step_s(
        Workload(batch=batch, tokens=tokens, train=train)
    )


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tensor=8, data=2), "needs 16 GPUs"),
        (Layout(tensor=3), "64 heads"),
        (Layout(tensor=8, expert=2), "no experts"),
        (Layout(tensor=0), "at least 1"),
    ],
)
def test_layouts_that_do_not_fit_say_why(layout: Layout, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        simulate("llama3-70b", "8xh200", layout)


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(OptionError, match="mixtral-8x7b"):
        simulate("llama9", "8xh200")


def test_scaling_reaches_128_nodes_and_exposes_more() -> None:
    result = scaling(replace(model("llama3-8b"), num_layers=2), PRESETS["8xh200"], nodes=(1, 128))
    assert [row.num_gpus for row in result.rows] == [8, 1024]
    assert result.rows[1].exposed_unfused_s > result.rows[0].exposed_unfused_s


def test_result_as_dictionary_table_and_plot(tmp_path: Path) -> None:
    result = simulate(replace(model("mixtral-8x7b"), num_layers=2), "8xh200", policy=Policy())
    values = json.loads(result.to_json(timeline=True))
    assert values["rows"][0]["speed_up"] == pytest.approx(result.rows[0].speed_up)
    assert {one["operator"] for one in values["rows"][0]["operators"]} >= {"moe_dispatch_gemm", "all_gather_gemm"}
    assert values["timeline"][-1]["end_s"] <= result.rows[0].fused_s * (1 + 1e-9)
    console = Console(file=StringIO(), width=200)
    console.print(result.table(), result.operator_table())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "mixtral-8x7b" in text and "gemm_reduce_scatter" in text
    result.plot(tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")


def test_command_writes_table_json_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.svg"), "--timeline"]
    assert main(["--model", "llama3-8b", "--topology", "2xh200", "--tensor", "2", "--forward", *files]) == 0
    assert "llama3-8b on 2xh200" in capsys.readouterr().out
    assert json.loads((tmp_path / "a.json").read_text())["timeline"]
    assert "<svg" in (tmp_path / "a.svg").read_text()


def test_command_plans_with_the_kernels_that_exist_and_says_what_others_would_add(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [
        "--model",
        "llama3-70b",
        "--tensor",
        "8",
        "--no-sequence",
        "--tokens",
        "16",
        "--forward",
        "--json",
        str(tmp_path / "a.json"),
    ]
    found = []
    for more in ([], ["--hypothetical"]):
        assert main([*few, *more]) == 0
        (row,) = json.loads((tmp_path / "a.json").read_text())["rows"]
        found.append((row["fused_s"], {one["operator"] for one in row["operators"]}))
    said = " ".join(capsys.readouterr().out.split())
    (here_s, here), (there_s, there) = found
    assert "ffn" in there - here and there_s < here_s
    assert said.count("(--hypothetical)") == 1 and f"{there_s * 1e3:.1f} ms, not {here_s * 1e3:.1f}" in said


def test_command_refuses_a_plot_that_nobody_can_write(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--plot", "steps.txt"])
    assert ended.value.code == 2 and "'steps.txt' must end in .png, .svg, .pdf" in capsys.readouterr().err


def test_command_scales_over_nodes(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert main(["--model", "llama3-8b", "--nodes", "1", "2", "--forward", "--json", str(path)]) == 0
    assert [row["num_gpus"] for row in json.loads(path.read_text())["rows"]] == [8, 16]


def test_command_predicts_single_operators(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    sites = ["--site", "gemm_all_reduce:8192x8192x512", "--site", "ffn:64x4096x4096x1792"]
    assert main([*sites, "--world", "8", "--json", str(path)]) == 0
    found = json.loads(path.read_text())["operators"]
    assert [(one["operator"], one["m"], one["world_size"]) for one in found] == [
        ("gemm_all_reduce", 8192, 8),
        ("ffn", 64, 8),
    ]


@pytest.mark.parametrize(
    "arguments", [["--model", "llama9"], ["--site", "gemm_all_reduce:8"], ["--site", "conv:1x2x3"], ["--tensor", "3"]]
)
def test_command_says_what_is_wrong(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err
