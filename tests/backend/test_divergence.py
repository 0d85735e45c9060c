"""Ranks whose graphs differ: an error that names them on the ranks that can tell, and no rank hangs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as funcol

from mkcompile.errors import PlanMismatchError
from tests.backend.calls import ALWAYS
from tests.spawn import Outcomes, run_cases

# A rank that waits for one that does something else gives up after this long.
DEADLINE = {"MKCOMPILE_TIMEOUT_S": "4"}
compiled_by_us = partial(torch.compile, backend="mkernel", fullgraph=True, options=ALWAYS)


def other_rows(rank: int, world_size: int) -> str:
    return told(lambda x, w: funcol.all_reduce(x @ w, "sum", "0"), torch.ones(8 + rank, 16))


def other_width(rank: int, world_size: int) -> str:
    return told(lambda x, w: funcol.all_reduce(x @ w[:, : 8 + 8 * rank], "sum", "0"), torch.ones(8, 16))


def fused_on_one_rank_only(rank: int, world_size: int) -> str:
    """`x * get_rank()` is a constant of the compiler: on rank 0 there is no product left to fuse."""

    def scaled(x: Tensor, w: Tensor) -> Tensor:
        product = x @ w if dist.get_rank() else x.new_zeros(x.shape[0], w.shape[1])
        return funcol.all_reduce(product, "sum", "0")

    return told(scaled, torch.ones(8, 16))


def more_on_one_rank(rank: int, world_size: int) -> str:
    """As in a causal ring: a later rank has one step more."""

    def steps(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(1 + dist.get_rank()):
            x = funcol.all_reduce(x @ w, "sum", "0")
        return x[:, :8] @ w[:8] if dist.get_rank() else funcol.all_reduce(x[:, :8] @ w[:8], "sum", "0")

    return told(steps, torch.ones(8, 16))


def other_policies(rank: int, world_size: int) -> str:
    options = {"mkernel.fuse": ("always", "never")[rank]}
    return told(lambda x, w: funcol.all_reduce(x @ w, "sum", "0"), torch.ones(8, 16), options)


def groups_in_another_order(rank: int, world_size: int) -> str:
    """Each rank waits for the other in another group, for ever (nccl#901)."""
    first, second = [dist.new_group([0, 1]).group_name for _ in range(2)][:: 1 - 2 * rank]

    def two_sums(x: Tensor, w: Tensor) -> Tensor:
        return funcol.all_reduce(x @ w, "sum", first) + funcol.all_reduce(x @ (2 * w), "sum", second)

    return told(two_sums, torch.ones(8, 16))


def told(function: object, x: Tensor, options: dict[str, str] | None = None) -> str:
    """What this rank is told: the error's class and message."""
    call = compiled_by_us(function, options=options or ALWAYS)
    with torch.no_grad():
        try:
            call(x, torch.ones(16, 16))
        except PlanMismatchError as error:
            return f"PlanMismatchError: {error}"
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


FUNCTIONS = (
    other_rows, other_width, fused_on_one_rank_only, more_on_one_rank, other_policies, groups_in_another_order,
)  # fmt: skip
CASES = {case.__name__: case for case in FUNCTIONS}


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return run_cases(CASES, 2, environment=DEADLINE, group_timeout_s=15.0, timeout_s=400.0)


def test_other_shapes_are_named_on_both_ranks(outcomes: Outcomes) -> None:
    for name, here, there in (("other_rows", "m=8", "m=9"), ("other_width", "n=8", "n=16")):
        for message in outcomes.values(name):
            assert message.startswith("PlanMismatchError")
            assert here in message and there in message and "rank 0" in message and "rank 1" in message


@pytest.mark.parametrize(("name", "waiting"), [("fused_on_one_rank_only", 1), ("other_policies", 0)])
def test_the_rank_that_fuses_names_the_one_that_does_not(outcomes: Outcomes, name: str, waiting: int) -> None:
    message = outcomes.values(name)[waiting]
    assert message.startswith("PlanMismatchError")
    assert f"rank {1 - waiting}: did not come within" in message
    assert outcomes.values(name)[1 - waiting].startswith("RuntimeError"), "gloo tells that the peer has left"


def test_another_number_of_steps_is_found(outcomes: Outcomes) -> None:
    assert any(message.startswith("PlanMismatchError") for message in outcomes.values("more_on_one_rank"))


def test_two_groups_in_another_order_on_each_rank_are_an_error_on_both(outcomes: Outcomes) -> None:
    for rank, message in enumerate(outcomes.values("groups_in_another_order")):
        assert message.startswith("PlanMismatchError")
        assert f"rank {1 - rank}: did not come within" in message
