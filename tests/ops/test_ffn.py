"""The feed-forward operator by itself: what it computes on four ranks, its shapes, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as nnf

from mkcompile.errors import GroupError, OperatorInputError
from mkcompile.ops.collectives import ACTIVATIONS
from mkcompile.ops.ffn import Ffn
from tests.lockstep import World, run

WORLD_SIZE = 4
GROUP = "0"
INNER, HIDDEN, COLUMNS = 8, 6, 12
pytestmark = pytest.mark.usefixtures("group")


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def call(rank: int, **changes: Any) -> Ffn:
    """Gated, separate up weights, gathered along 1 and scattered along 1; x [2, 4, 8], every rank with its own."""
    given = Ffn(
        x=draw(2, 4, INNER, seed=10 + rank),
        w_up=[draw(INNER, HIDDEN, seed=20 + rank), draw(INNER, HIDDEN, seed=30 + rank)],
        bias_up=[draw(HIDDEN, seed=40 + rank), None],
        w_down=draw(HIDDEN, COLUMNS, seed=50 + rank),
        bias_down=draw(COLUMNS, seed=60 + rank),
        activation="silu",
        gated=True,
        saved=[True] * 4,
        gather_dim=1,
        shape=[2, 16, COLUMNS],
        scatter_dim=1,
        reduce_op="sum",
        world_size=WORLD_SIZE,
        group=GROUP,
        plan_key="",
    )
    return replace(given, **changes)


def packed(rank: int) -> Ffn:
    """The same network with one packed weight."""
    given = call(rank)
    bias = torch.cat([given.bias_up[0], torch.zeros(HIDDEN)])  # type: ignore[list-item]
    return replace(given, w_up=[torch.cat(list(given.w_up), 1)], bias_up=[bias], saved=[True] * 3)


def plain(rank: int, activation: str) -> Ffn:
    """Linear, activation, linear, averaged over the group; nothing is gathered."""
    given = call(rank)
    return replace(
        given,
        w_up=given.w_up[:1],
        bias_up=given.bias_up[:1],
        saved=[True] * 3,
        activation=activation,
        gated=False,
        gather_dim=-1,
        scatter_dim=-1,
        shape=[],
        reduce_op="avg",
    )


def test_a_gated_network_is_gathered_and_scattered() -> None:
    calls = [call(rank) for rank in range(WORLD_SIZE)]
    x = torch.cat([one.x for one in calls], 1).double()
    partials = []
    for one in calls:
        gate, up = (x @ w.double() for w in one.w_up)
        hidden = nnf.silu(gate + one.bias_up[0]) * up  # type: ignore[operator]
        partials.append(hidden @ one.w_down.double() + one.bias_down)  # type: ignore[operator]
    wanted = sum(partials).chunk(WORLD_SIZE, 1)  # type: ignore[union-attr]
    found = run(World(WORLD_SIZE), lambda one: one.reference(), lambda rank: [calls[rank]])
    for rank, (y, gathered, gate, up, hidden) in enumerate(found):
        torch.testing.assert_close(y.double(), wanted[rank], rtol=1e-5, atol=1e-5)
        assert torch.equal(gathered, x.float())
        assert gate.shape == up.shape == hidden.shape == (32, HIDDEN)
        torch.testing.assert_close(hidden, nnf.silu(gate) * up)


def test_a_packed_weight_is_gate_first() -> None:
    separate = run(World(WORLD_SIZE), lambda one: one.reference(), lambda rank: [call(rank)])
    together = run(World(WORLD_SIZE), lambda one: one.reference(), lambda rank: [packed(rank)])
    for (y, _, gate, up, hidden), (other_y, _, both, other_hidden) in zip(separate, together, strict=True):
        torch.testing.assert_close(other_y, y)
        torch.testing.assert_close(both, torch.cat([gate, up], 1))
        torch.testing.assert_close(other_hidden, hidden)


def test_the_inner_dimension_may_be_gathered() -> None:
    def gathered_columns(rank: int) -> Ffn:
        inner = WORLD_SIZE * INNER
        w_up = [draw(inner, HIDDEN, seed=70 + i) for i in range(2)]
        return call(rank, w_up=w_up, gather_dim=2, shape=[8, COLUMNS], scatter_dim=0)

    calls = [gathered_columns(rank) for rank in range(WORLD_SIZE)]
    for one in calls:
        one.check()
    x = torch.cat([one.x for one in calls], 2)
    for _, gathered, gate, _, _ in run(World(WORLD_SIZE), lambda one: one.reference(), lambda rank: [calls[rank]]):
        assert torch.equal(gathered, x) and gate.shape == (8, HIDDEN)


TRUTHS = {
    "relu": nnf.relu,
    "relu2": lambda x: nnf.relu(x) ** 2,
    "gelu": nnf.gelu,
    "gelu_tanh": lambda x: nnf.gelu(x, approximate="tanh"),
    "silu": nnf.silu,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_and_an_average(activation: str) -> None:
    calls = [plain(rank, activation) for rank in range(WORLD_SIZE)]
    partials = []
    for one in calls:
        up = one.x.flatten(0, 1).double() @ one.w_up[0].double() + one.bias_up[0]  # type: ignore[operator]
        partials.append(TRUTHS[activation](up) @ one.w_down.double() + one.bias_down)
    wanted = sum(partials) / WORLD_SIZE
    for found in run(World(WORLD_SIZE), lambda one: one.reference(), lambda rank: [calls[rank]]):
        torch.testing.assert_close(found[0].double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("saved", [[False] * 4, [True, False, True, False], [False, True, False, True], [True] * 4])
def test_only_what_is_asked_for_is_returned(saved: list[bool]) -> None:
    everything = run(World(WORLD_SIZE), lambda one: one.reference(), lambda rank: [call(rank)])[0]
    found = run(World(WORLD_SIZE), lambda one: one.reference(), lambda rank: [call(rank, saved=saved)])[0]
    wanted = [everything[0], *(one for one, keep in zip(everything[1:], saved, strict=True) if keep)]
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = call(0, saved=saved).fake()
    assert [one.shape for one in fake] == [one.shape for one in found]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reduce_op": "max"}, "sum, avg"),
        ({"activation": "elu"}, "unknown activation 'elu'"),
        ({"gated": False}, "do not fit gated=False"),
        ({"bias_up": [None]}, "do not fit"),
        ({"saved": [True]}, "give 4 saved flags, got 1"),
        ({"w_up": [draw(INNER, 5, seed=0)] * 2}, r"w_up\[0\] must be \[8, 6\]"),
        ({"w_up": [draw(INNER, HIDDEN, seed=0)], "bias_up": [None], "saved": [True] * 3}, r"must be \[8, 12\]"),
        ({"bias_up": [draw(5, seed=0), None]}, r"bias_up\[0\] must be \[6\]"),
        ({"bias_down": draw(5, seed=0)}, r"bias_down must be \[12\]"),
        ({"shape": [2, 15, COLUMNS]}, "does not describe"),
        ({"shape": [16, 2, COLUMNS]}, "which 4 ranks do not divide"),
        ({"scatter_dim": 3}, "dim 3 is outside"),
        ({"gather_dim": 3}, "dim 3 is outside"),
        ({"w_down": draw(HIDDEN, COLUMNS, seed=0).bfloat16()}, "one dtype"),
        ({"w_down": draw(HIDDEN, COLUMNS, seed=0).int()}, "floating-point"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OperatorInputError, match=message):
        call(0, **changes).check()


def test_a_wrong_group_is_named() -> None:
    with pytest.raises(GroupError, match="no process group named 'nowhere'"):
        call(0, group="nowhere").check()


def test_the_problem_says_what_is_computed_and_moved() -> None:
    problem = call(0).problem()
    assert (problem.m, problem.k, problem.hidden, problem.n) == (32, INNER, HIDDEN, COLUMNS)
    assert (problem.gated, problem.gathers, problem.scatters, problem.outer) == (True, True, True, 2)
    assert problem.flops == 2 * 32 * HIDDEN * (2 * INNER + COLUMNS)
    reduced = plain(0, "relu").problem()
    assert (reduced.gated, reduced.gathers, reduced.scatters, reduced.m) == (False, False, False, 8)
