"""Residuals that reductions are added to in place: Inductor's code of it, the report, values by real ranks.

The sizes are ones that kernels of many rows are planned for; no kernel runs here, operators compute by their reference.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.utils import get_code

import mkcompile
from mkcompile.passes.reason import Residual
from tests.backend.calls import same_on_all
from tests.spawn import run_cases

ROWS, WIDTH = 2048, 64
OPTIONS: dict[str, Any] = {"mkernel.fuse": "always", "mkernel.topology": "2xh200"}


def layers(h: Tensor, sequence_parallel: bool, *weights: Tensor) -> Tensor:
    """[2, S, WIDTH]; sequence parallel: S is half of the sequence."""
    for w in weights:
        x = torch.relu(h)
        if sequence_parallel:
            x = torch.cat(funcol.all_gather_tensor(x, 0, "0").chunk(2), 1)
            h = h + funcol.reduce_scatter_tensor(torch.sin(x) @ w, "sum", 1, "0")
        else:
            h = h + funcol.all_reduce(x @ w, "sum", "0")
    return h


def operands(dtype: torch.dtype, sequence_parallel: bool) -> tuple[Tensor, ...]:
    x = same_on_all(2, ROWS // (4 if sequence_parallel else 2), WIDTH).to(dtype)
    return x, *(same_on_all(WIDTH, WIDTH, seed=seed).to(dtype) / 8 for seed in range(4))


def code_of(sequence_parallel: bool, **options: Any) -> str:
    """Of four layers; nothing of it is built."""
    torch._dynamo.reset()
    call = torch.compile(layers, backend="mkernel", fullgraph=True, options={**OPTIONS, **options})
    h, *weights = operands(torch.bfloat16, sequence_parallel)
    with inductor_config.patch(force_disable_caches=True), torch.no_grad():
        return "\n".join(get_code(call, h, sequence_parallel, *weights))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_residual_is_stored_once_and_never_copied(fake_world: int, sequence_parallel: bool) -> None:
    name = "gemm_reduce_scatter" if sequence_parallel else "gemm_all_reduce"
    code = code_of(sequence_parallel)
    assert code.count(f"MkcompileSite('{name}'") == 1 and code.count(f"MkcompileSite('{name}_add', fixed=True)") == 3
    body = code[code.index("def call(") : code.index("def get_args(")]
    (residual,) = set(re.findall(rf"= mkcompile_{name}_add_buf\d+\((?:reinterpret_tensor\()?(buf\d+)", body))
    assert re.search(rf"return \({residual}, \)", body), "and it is what the graph returns"
    kernels = re.findall(r"(cpp_fused_\w+)\(([^)]*)\)", body)
    written = [name for name, arguments in kernels if residual in arguments and "add" in name]
    assert len(written) == 1, "the first sum, of an input of the graph, is Inductor's"
    assert "clone" not in body and "copy_" not in body


def test_the_option_leaves_the_addition_to_inductor(fake_world: int) -> None:
    assert "_add'" not in code_of(False, **{"mkernel.residuals": "apart"})
    assert "_add'" not in code_of(False, **{"mkernel.fuse": "never"})


def test_few_rows_are_left_to_inductor(fake_world: int) -> None:
    h, *weights = operands(torch.bfloat16, False)
    report = mkcompile.explain(layers, h[:, :16].contiguous(), False, *weights, options=OPTIONS)
    assert [one.residual for one in report.collectives] == [Residual.INPUT, *[Residual.KERNEL] * 3]


def test_the_report_says_what_became_of_each(fake_world: int, capsys: pytest.CaptureFixture[str]) -> None:
    report = mkcompile.explain(layers, *_explained(), options=OPTIONS)
    assert [one.operator for one in report.collectives] == ["gemm_all_reduce"] * 4
    assert [one.residual for one in report.collectives] == [Residual.INPUT, *[Residual.ADDED] * 3]
    assert sorted({one.site for one in report.collectives}) == [1, 2, 3, 4], "each found in the rewritten graph"
    report.print()
    printed = capsys.readouterr().out
    assert "residual added in place #2 #3 #4" in printed
    assert "residual not added in place #1: residual is an input of the graph" in printed
    assert [one["residual"] for one in report.to_dict()["collectives"]] == ["INPUT", *["ADDED"] * 3]


def _explained() -> tuple[Any, ...]:
    h, *weights = operands(torch.bfloat16, False)
    return h, False, *weights


def values_of_a_form(rank: int, world_size: int, sequence_parallel: bool) -> tuple[float, float, bool]:
    """The largest difference from eager, the largest value, whether the input was left as it was."""
    x, *weights = operands(torch.bfloat16, sequence_parallel)
    h = x * (rank + 1) if sequence_parallel else x
    kept = h.clone()
    call = torch.compile(layers, backend="mkernel", fullgraph=True, options=OPTIONS)
    with torch.no_grad():
        want = layers(h, sequence_parallel, *weights)
        got = [call(h, sequence_parallel, *weights) for _ in range(2)]
    worst = max(float((one.float() - want.float()).abs().max()) for one in got)
    return worst, float(want.float().abs().max()), torch.equal(h, kept)


@pytest.mark.parametrize("sequence_parallel", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ranks_compute_what_eager_computes(sequence_parallel: bool) -> None:
    case = partial(values_of_a_form, sequence_parallel=sequence_parallel)
    for worst, largest, is_kept in run_cases({"layers": case}, world_size=2).values("layers"):
        assert worst <= 2**-6 * largest and is_kept
