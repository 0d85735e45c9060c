"""The page with our predictions for two nodes says what the planner says; what needs GPUs says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import command, published
from benchmarks.published import PAGE, predict, with_table
from mkcompile.plan.simulate import main as simulate


def test_the_table_is_as_the_planner_has_it_now() -> None:
    page = PAGE.read_text()
    assert with_table(page) == page, "run `python -m benchmarks.published --write` and read the text around it again"


def test_every_published_row_is_in_it() -> None:
    assert len(list(published.lines())) == 2 + len(published.published())
    assert {operator for operator, _ in published.published()} == {
        "all_gather_gemm", "gemm_all_reduce", "gemm_reduce_scatter", "moe_dispatch_gemm", "ring_attention",
    }  # fmt: skip


def test_the_table_has_what_simulate_answers(tmp_path: Path) -> None:
    """With the kernels that exist, and with all."""
    sites = ["--site", "gemm_all_reduce:16384x16384x1024", "--site", "all_gather_gemm:16384x1024x16384"]
    for more, policy in (([], published.EXISTING), (["--hypothetical"], published.ALL)):
        file = tmp_path / "sites.json"
        assert simulate(["--topology", "2x8xh200", *sites, *more, "--json", str(file)]) == 0
        for one in json.loads(file.read_text())["operators"]:
            ours = predict(one["operator"], 16384, policy)
            assert one["fused_s"] * 1e6 == pytest.approx(ours.fused_us)
            assert one["unfused_s"] * 1e6 == pytest.approx(ours.unfused_us)
            assert (one["refusal"] is None) == ours.is_fused


@pytest.mark.parametrize(("operator", "limit"), [("moe_dispatch_gemm", 1.25), ("ring_attention", 1.45)])
def test_what_has_no_plan_yet_is_near_what_was_published(operator: str, limit: float) -> None:
    for (name, size), networks in published.published().items():
        if name == operator:
            _, ours = predict(name, size).rates
            for _, fused in networks.values():
                assert 1 / limit < ours / fused < limit, (size, ours, fused)


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="this machine has the GPUs")
def test_operators_are_not_timed_without_gpus() -> None:
    with pytest.raises(SystemExit, match="bench ops needs 2 CUDA GPUs"):
        command.main(["ops"])
