"""Tuning in lock-step: same results everywhere, resumed where it broke, and errors that name the rank."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch.distributed as dist

from mkcompile.errors import CompileError, WorkspaceError
from mkcompile.ops.problem import Problem
from mkcompile.plan import PRESETS, UNFUSED, Plan, PlanTable, Policy, tune_command
from mkcompile.plan.buckets import entry_name
from mkcompile.plan.decide import unfused_plan
from mkcompile.plan.disk import Measured, Results, load_results, results_path, save_results
from mkcompile.plan.exchange import Ranks
from mkcompile.plan.tune import Request, TuneError, tune
from tests.plan.problems import problem
from tests.spawn import Outcomes, run_cases

PAIR = PRESETS["2xh200"]
PROBLEMS = (problem("gemm_all_reduce", 4096, 8192, 1024), problem("gemm_reduce_scatter", 8192, 8192, 3584))


@dataclass(slots=True)
class FakeMeasurer:
    """Times come from a function; `calls` counts."""

    seconds: Callable[[Problem, Plan], float]
    refuse: Callable[[Plan], bool] = lambda plan: False
    calls: list[str] = field(default_factory=list)
    told: int = 0

    def ahead(self, work: Sequence[tuple[Problem, Plan]]) -> None:
        self.told += len(work)

    def prepare(self, problem: Problem, plan: Plan) -> Callable[[], float]:
        if self.refuse(plan):
            raise CompileError("no such kernel here")
        self.calls.append(plan.name)
        return lambda: self.seconds(problem, plan)


def on_two_ranks(
    measurers: list[FakeMeasurer | None], folder: Path, timeout_s: float = 20.0
) -> list[Results | BaseException]:
    """Two threads as ranks; None for a rank that never comes."""
    store = dist.HashStore()
    outcomes: list[Results | BaseException] = [RuntimeError("never ran")] * 2

    def rank_main(rank: int, measurer: FakeMeasurer) -> None:
        ranks = Ranks(rank=rank, world_size=2, store=store, timeout_s=timeout_s)
        request = Request(problems=PROBLEMS, topology=PAIR, limit=3, folder=folder / str(rank))
        try:
            outcomes[rank] = tune(request, measurer, ranks)
        except TuneError as error:
            outcomes[rank] = error

    threads = [
        threading.Thread(target=rank_main, args=(rank, one)) for rank, one in enumerate(measurers) if one is not None
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return outcomes


def by_variant(problem: Problem, plan: Plan) -> float:
    return 1.0 if plan.variant == UNFUSED else 0.5 + plan.tile.columns * 1e-4


def test_slowest_rank_counts_and_all_ranks_get_the_same(tmp_path: Path) -> None:
    slow = FakeMeasurer(seconds=lambda problem, plan: 2 * by_variant(problem, plan))
    outcomes = on_two_ranks([FakeMeasurer(seconds=by_variant), slow], tmp_path)
    assert isinstance(outcomes[0], Results) and isinstance(outcomes[1], Results)
    assert outcomes[0].to_json() == outcomes[1].to_json()
    best = outcomes[0].best(entry_name(PROBLEMS[0]))
    assert best is not None and best.plan.fused and best.seconds is not None
    assert best.seconds == pytest.approx(2 * (0.5 + best.plan.tile.columns * 1e-4))


def test_table_prefers_measurements(tmp_path: Path) -> None:
    slow_kernels = FakeMeasurer(seconds=lambda problem, plan: 1.0 if plan.variant == UNFUSED else 3.0)
    results = on_two_ranks([slow_kernels, FakeMeasurer(seconds=by_variant)], tmp_path)[0]
    assert isinstance(results, Results)
    assert PlanTable(topology=PAIR).plan(PROBLEMS[0]).fused
    assert not PlanTable(topology=PAIR, tuned=results).plan(PROBLEMS[0]).fused
    other_bucket = replace(PROBLEMS[0], m=128)
    assert PlanTable(topology=PAIR, tuned=results).plan(other_bucket).fused


def test_second_run_measures_nothing(tmp_path: Path) -> None:
    first = [FakeMeasurer(seconds=by_variant), FakeMeasurer(seconds=by_variant)]
    before = on_two_ranks([*first], tmp_path)
    again = [FakeMeasurer(seconds=by_variant), FakeMeasurer(seconds=by_variant)]
    after = on_two_ranks([*again], tmp_path)
    assert len(first[0].calls) == len(first[1].calls) == 8
    assert first[1].told == 8, "kernels can be compiled before the first is needed"
    assert again[0].calls == again[1].calls == []
    assert isinstance(before[0], Results) and isinstance(after[1], Results)
    assert before[0].to_json() == after[1].to_json()


def test_a_kernel_that_one_rank_lacks_is_left_out_on_all(tmp_path: Path) -> None:
    lacking = FakeMeasurer(seconds=by_variant, refuse=lambda plan: plan.variant == "direct")
    outcomes = on_two_ranks([FakeMeasurer(seconds=by_variant), lacking], tmp_path)
    results = outcomes[0]
    assert isinstance(results, Results)
    tried = results.entries[entry_name(PROBLEMS[0])].values()
    missing = [one for one in tried if one.plan.variant == "direct"]
    assert missing and all(one.seconds is None and "rank 1: CompileError" in one.error for one in missing)
    best = results.best(entry_name(PROBLEMS[0]))
    assert best is not None and best.plan.variant != "direct"


def test_a_candidate_that_only_its_launch_refuses_is_left_out_on_all(tmp_path: Path) -> None:
    def seconds(problem: Problem, plan: Plan) -> float:
        if plan.variant == "direct":
            raise WorkspaceError("no room")
        return by_variant(problem, plan)

    results = on_two_ranks([FakeMeasurer(seconds=by_variant), FakeMeasurer(seconds=seconds)], tmp_path)[0]
    assert isinstance(results, Results)
    refused = [one for one in results.entries[entry_name(PROBLEMS[0])].values() if one.plan.variant == "direct"]
    assert refused and all(one.seconds is None and one.error == "rank 1: WorkspaceError: no room" for one in refused)


def breaks_on(name: str) -> FakeMeasurer:
    def seconds(problem: Problem, plan: Plan) -> float:
        if plan.operator == name and plan.fused:
            raise RuntimeError("the device fell off")
        return by_variant(problem, plan)

    return FakeMeasurer(seconds=seconds)


def test_a_failing_rank_is_named_on_all_and_what_was_measured_is_kept(tmp_path: Path) -> None:
    outcomes = on_two_ranks([FakeMeasurer(seconds=by_variant), breaks_on("gemm_reduce_scatter")], tmp_path)
    assert isinstance(outcomes[0], TuneError) and "rank 1 failed" in str(outcomes[0])
    assert "the device fell off" in str(outcomes[0]) and "gemm_reduce_scatter/push" in str(outcomes[0])
    assert isinstance(outcomes[1], TuneError) and "this rank (1) failed" in str(outcomes[1])
    kept = load_results(PAIR, tmp_path / "0")
    assert kept.best(entry_name(PROBLEMS[0])) is not None
    resumed = [FakeMeasurer(seconds=by_variant), FakeMeasurer(seconds=by_variant)]
    assert isinstance(on_two_ranks([*resumed], tmp_path)[0], Results)
    assert len(resumed[0].calls) == 4, "the bucket that broke is measured as a whole"


def test_a_rank_that_never_comes_is_an_error_in_time(tmp_path: Path) -> None:
    outcomes = on_two_ranks([FakeMeasurer(seconds=by_variant), None], tmp_path, timeout_s=0.3)
    assert isinstance(outcomes[0], TuneError)
    assert "waited 0.3 s for rank 1" in str(outcomes[0])


def test_results_depend_on_topology_and_versions(tmp_path: Path) -> None:
    driver = replace(PAIR, versions={"driver": "580"})
    paths = {results_path(one, tmp_path) for one in (PAIR, driver, PRESETS["8xh200"])}
    assert len(paths) == 3


def test_results_of_one_node_hold_whatever_network_it_has(tmp_path: Path) -> None:
    one, two = entry_name(PROBLEMS[0]), entry_name(replace(PROBLEMS[0], num_nodes=2, per_node=1))
    plan = unfused_plan(PROBLEMS[0], PAIR)
    kept = Results()
    kept.add(one, Measured(plan=plan, seconds=1.0))
    save_results(replace(PAIR, transport=""), kept, tmp_path)
    for here in (replace(PAIR, transport="rc"), replace(PAIR, transport="tcp", nic_gbps=3.0)):
        assert load_results(here, tmp_path).has(one, plan)
        pairs = here.reaching(2)
        spanning = load_results(pairs, tmp_path)
        assert spanning.has(one, plan) and not spanning.has(two, plan)
        spanning.add(two, Measured(plan=plan, seconds=2.0))
        save_results(pairs, spanning, tmp_path)
        assert load_results(pairs, tmp_path).has(two, plan)
    assert not load_results(replace(PAIR, transport="srd").reaching(2), tmp_path).has(two, plan), "another network"
    kept.add(one, Measured(plan=plan, seconds=3.0))
    save_results(PAIR, kept, tmp_path)
    best = load_results(pairs, tmp_path).best(one)
    assert best is not None and best.seconds == 3.0, "measured again"


def test_progress_counts_up(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    request = Request(problems=PROBLEMS[:1], topology=PAIR, limit=2, folder=tmp_path)
    tune(request, FakeMeasurer(seconds=by_variant), Ranks(), lambda done, total, what: seen.append((done, total)))
    assert seen == [(0, 3), (0, 3), (1, 3), (2, 3), (3, 3)]


def tune_reference(rank: int, world_size: int) -> tuple[str, list[str], str]:
    """On gloo: times the reference of all operators."""
    from mkcompile.plan.reference import Maker, ReferenceMeasurer

    problems = [
        problem("gemm_all_reduce", 32, 16, 24, has_bias=True, num_gemms=2),
        problem("gemm_reduce_scatter", 32, 16, 24, outer=2),
        problem("gemm_reduce_scatter", 32, 16, 24, dim="columns"),
        problem("all_gather_gemm", 32, 16, 24, num_gemms=2, returns_gathered=True, weight_layout="kn"),
        problem("all_gather_gemm", 32, 16, 24, dim="columns"),
        problem("ffn", 32, 16, 24, gathers=True, scatters=True),
    ]
    group = dist.group.WORLD
    assert group is not None
    ranks = Ranks(rank=rank, world_size=world_size, store=dist.distributed_c10d._get_default_store(), timeout_s=30)
    measurer = ReferenceMeasurer(maker=Maker(group=group.group_name, seed=rank))
    with tempfile.TemporaryDirectory() as folder:
        request = Request(problems=problems, topology=PRESETS["cpu"], rounds=2, folder=Path(folder))
        results = tune(request, measurer, ranks)
    table = PlanTable(topology=PRESETS["cpu"], policy=Policy(fuse="always"), tuned=results)
    return results.to_json(), sorted(results.plans()), table.plan(problems[0]).variant


def tune_by_command(rank: int, world_size: int) -> tuple[int, int]:
    """On gloo: the command, twice; the group is the command's from then on."""
    with tempfile.TemporaryDirectory() as folder:
        options = tune_command.parser().parse_args(["--folder", folder, "--sweep", f"{folder}/sweep.jsonl"])
        options.problems = [problem("gemm_all_reduce", 32, 16, 24)]
        status = tune_command.run_in_rank(options, tune_command.cpu_bench)
        kept = len(list(Path(folder).rglob("*.json")))
    return status, kept


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return run_cases({"reference": tune_reference, "command": tune_by_command}, world_size=2)


def test_command_keeps_results_of_rank_0(outcomes: Outcomes) -> None:
    assert outcomes.values("command") == [(0, 1), (0, 0)]


def test_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune_command.main(["--site", "conv:1x2x3"]) == 2
    assert "operator:MxNxK" in capsys.readouterr().err


def test_reference_is_tuned_on_two_gloo_ranks(outcomes: Outcomes) -> None:
    first, second = outcomes.values("reference")
    assert first == second
    text, entries, variant = first
    assert len(entries) == 6
    assert variant == "reference", "the sequence alone was measured, which overrules no policy"
    for entry in Results.from_json(text).entries.values():
        assert all(one.seconds is not None and 0 < one.seconds < 10 for one in entry.values())
