"""Which all-gathers stay as they are, and why. Legend and conventions as in `test_all_gather_gemm`."""

from __future__ import annotations

from collections import Counter
from operator import getitem
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor, fx
from torch.nn import functional as nnf

from mkcompile.passes.all_gather_gemm import find
from mkcompile.passes.reason import Reason
from mkcompile.passes.site import Match, Refusal, Site
from tests.captured import Captured, capture_each
from tests.operators.test_all_gather_gemm import (
    GROUP,
    WORLD_SIZE,
    Function,
    c10d,
    flat_gathered,
    gathered,
    inputs,
    name_of,
)

pytestmark = pytest.mark.usefixtures("group")


def added(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return (gathered(x + 1, 1) + 1) @ w.t()


def rectified(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """Inductor moves the relu to the pieces of the cat."""
    return gathered(x + 2, 1).relu() @ w.t()


def cast(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return gathered((x + 3).bfloat16(), 1).float() @ w.t()


def permuted(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """Sequence first behind a gather of batch first: the rows are in another order."""
    return nnf.linear(gathered(x + 15, 1).transpose(0, 1), w)


def cut(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return gathered(x + 4, 1)[:, :7] @ w.t()


def padded(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """Shards of 2, 2, 2 and 1 rows, as DTensor gathers them."""
    return gathered(nnf.pad(x[:, :1] + 5, (0, 0, 0, 1)), 1)[:, :7].contiguous() @ w.t()


def regrouped(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return gathered(x[..., :4] + 6, 1).reshape(16, 8) @ w.t()


def no_gemm(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return gathered(x + 7, 1).softmax(-1)


def gathered_product(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """A column-parallel language-model head with a gathered output."""
    return gathered((x + 8) @ w.t(), 2)


def batched(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return torch.bmm(gathered(x + 9, 1), x.view(4, 8, 2))


def scaled(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, gathered(x[0] + 10, 0), w.t(), alpha=2)


def bias_of_rows(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(x.view(-1)[:8, None], gathered(x[0] + 11, 0), w.t())


def gram(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    g = gathered(x[0] + 12, 0)
    return g @ (g.t() * 2)


def double(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return gathered(x.double() + 13, 1) @ w.t().double()


def parameter(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """A weight that is sharded over the group, as in fully sharded data parallelism."""
    return x.view(8, 8) @ gathered(w, 0).t()


def parameter_cast(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return x.view(8, 8).bfloat16() @ gathered(w.bfloat16(), 0).t()


def two_orders(x: Tensor, w: Tensor, bias: Tensor) -> list[Tensor]:
    whole = flat_gathered(x + 14)
    return [whole @ w.t(), torch.cat(whole.chunk(WORLD_SIZE), 1) @ w.t()]


REFUSED: list[tuple[Function, Reason]] = [
    (added, Reason.OP_BEFORE_GEMM),
    (rectified, Reason.OP_BEFORE_GEMM),
    (cast, Reason.OP_BEFORE_GEMM),
    (permuted, Reason.OP_BEFORE_GEMM),
    (cut, Reason.UNEVEN_GATHER),
    (padded, Reason.UNEVEN_GATHER),
    (regrouped, Reason.GATHER_REGROUPED),
    (no_gemm, Reason.NO_GEMM),
    (gathered_product, Reason.GEMM_BEFORE_GATHER),
    (batched, Reason.GEMM_KIND),
    (scaled, Reason.GEMM_SCALED),
    (bias_of_rows, Reason.BIAS_SHAPE),
    (gram, Reason.DEPENDENT_GEMMS),
    (double, Reason.DTYPE),
    (parameter, Reason.PARAMETER_GATHER),
    (parameter_cast, Reason.PARAMETER_GATHER),
    (two_orders, Reason.GATHERED_IN_TWO_ORDERS),
]


@pytest.fixture(scope="module")
def refused(group: None) -> tuple[Captured, dict[str, Site]]:
    return capture_each([function for function, _ in REFUSED], *inputs())


@pytest.mark.parametrize(("function", "reason"), REFUSED, ids=name_of)
def test_what_can_not_be_fused_says_why(
    refused: tuple[Captured, dict[str, Site]], function: Function, reason: Reason
) -> None:
    _, sites = refused
    assert (sites[function.__name__].operator, sites[function.__name__].reason) == (None, reason)


def test_refused_sites_are_left_as_they_were(refused: tuple[Captured, dict[str, Site]]) -> None:
    graph, _ = refused
    assert not graph.calls and graph.left == Counter(all_gather_into_tensor=len(REFUSED))


def test_what_torch_fully_sharded_data_parallelism_gathers_is_left_alone() -> None:
    def built(gather: Any, *args: Any) -> Match | Refusal | None:
        graph = fx.Graph()
        x = graph.placeholder("x")
        copied = graph.call_function(torch.ops.fsdp.all_gather_copy_in.default, ([x], [], [64], 64, 0))
        shard = graph.call_function(getitem, (copied, 0))
        collective = graph.call_function(gather, (shard, WORLD_SIZE, GROUP, *args))
        wait = graph.call_function(c10d.wait_tensor.default, (collective,))
        mm = graph.call_function(torch.ops.aten.mm.default, (wait, x))
        for node, shape in ((x, (8, 8)), (shard, (2, 8)), (collective, (8, 8)), (wait, (8, 8)), (mm, (8, 8))):
            node.meta["val"] = torch.empty(shape, device="meta")
        return find(collective)

    for found in (
        built(c10d.all_gather_into_tensor.default),
        built(c10d.all_gather_into_tensor_out.default),
    ):
        assert isinstance(found, Refusal) and found.reason is Reason.PARAMETER_GATHER
