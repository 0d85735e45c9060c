"""Feed-forward network: (all-gather,) up projection, activation, down projection, all-reduce or reduce-scatter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from torch import Tensor

from mkcompile.errors import OperatorInputError
from mkcompile.ops import by_hand, checks, collectives
from mkcompile.ops._gemms import common_layout, dtype_name, static_size
from mkcompile.ops.groups import AnyGroup
from mkcompile.ops.problem import Problem
from mkcompile.ops.registry import register


@register
@dataclass(frozen=True, slots=True)
class Ffn:
    """`reduce(hidden @ w_down + bias_down)` with `hidden = act(x @ w_up[0]) [* (x @ w_up[1])]`.

    Shapes: x [.., K], gathered along `gather_dim` first unless that is -1, then read as [M, K]; w_up[i] [K, H], or one
    packed [K, 2 H] where `gated` with a single weight (gate first); w_down [H, N]; biases [H], [2 H], [N].
    `scatter_dim` -1: all-reduce, y is [M, N]. Otherwise the product is read as `shape` and scattered along that
    dimension, as in `gemm_reduce_scatter`.
    The result is y, then those of gathered x (its own shape), up products ([M, H] or [M, 2 H] each) and hidden
    ([M, H]) for which `saved` (2 + len(w_up) flags, in that order) is set: what a backward pass needs again.
    """

    NAME: ClassVar[str] = "ffn"
    SCHEMA: ClassVar[str] = (
        "(Tensor x, Tensor[] w_up, Tensor?[] bias_up, Tensor w_down, Tensor? bias_down, str activation, bool gated, "
        "bool[] saved, int gather_dim, SymInt[] shape, int scatter_dim, str reduce_op, int world_size, str group, "
        "str plan_key) -> Tensor[]"
    )

    x: Tensor
    w_up: Sequence[Tensor]
    bias_up: Sequence[Tensor | None]
    w_down: Tensor
    bias_down: Tensor | None
    activation: str
    gated: bool
    saved: Sequence[bool]
    gather_dim: int
    shape: Sequence[int]
    scatter_dim: int
    reduce_op: str
    world_size: int
    group: str
    plan_key: str

    @property
    def _packed(self) -> bool:
        return self.gated and len(self.w_up) == 1

    def _gathered_shape(self) -> list[int]:
        return [size * self.world_size if i == self.gather_dim else size for i, size in enumerate(self.x.shape)]

    def check(self) -> None:
        """Raises: OperatorInputError, GroupError."""
        checks.check_reduce_op(self.NAME, self.reduce_op)
        checks.check_tensor(self.NAME, "x", self.x)
        checks.check_tensor(self.NAME, "w_down", self.w_down, 2)
        if self.gather_dim >= 0:
            checks.check_dim(self.NAME, self.gather_dim, self.x.dim())
        if self.activation not in collectives.ACTIVATIONS:
            known = ", ".join(collectives.ACTIVATIONS)
            raise OperatorInputError(f"{self.NAME}: unknown activation {self.activation!r}; one of {known}")
        if len(self.w_up) not in ((1, 2) if self.gated else (1,)) or len(self.bias_up) != len(self.w_up):
            raise OperatorInputError(f"{self.NAME}: {len(self.w_up)} up weights do not fit gated={self.gated}")
        if len(self.saved) != 2 + len(self.w_up):
            raise OperatorInputError(f"{self.NAME}: give {2 + len(self.w_up)} saved flags, got {len(self.saved)}")
        hidden, width = self.w_down.shape[0], self.w_down.shape[0] * (2 if self._packed else 1)
        inner = self._gathered_shape()[-1]
        for i, (weight, bias) in enumerate(zip(self.w_up, self.bias_up, strict=True)):
            checks.check_tensor(self.NAME, f"w_up[{i}]", weight, 2)
            if tuple(weight.shape) != (inner, width):
                raise OperatorInputError(f"{self.NAME}: w_up[{i}] must be [{inner}, {width}] for {hidden} hidden")
            if bias is not None and tuple(bias.shape) != (width,):
                raise OperatorInputError(f"{self.NAME}: bias_up[{i}] must be [{width}]")
        if self.bias_down is not None and tuple(self.bias_down.shape) != (self.w_down.shape[1],):
            raise OperatorInputError(f"{self.NAME}: bias_down must be [{self.w_down.shape[1]}]")
        self._check_scatter()
        checks.check_not_scaled(self.NAME, self.x)
        tensors = [self.x, *self.w_up, self.w_down, *self.bias_up, self.bias_down]
        checks.check_same(self.NAME, "input, weights and biases", tensors)
        checks.check_not_meta(self.NAME, tensors)
        checks.check_group(self.NAME, self.group, self.world_size)

    def _check_scatter(self) -> None:
        if self.scatter_dim < 0:
            return
        product = prod(self._gathered_shape()[:-1]), self.w_down.shape[1]
        checks.check_scatter(self.NAME, self.shape, self.scatter_dim, product, self.world_size)

    def reference(self) -> list[Tensor]:
        """The unfused sequence by ATen and functional collectives."""
        gathered = self.x
        if self.gather_dim >= 0:
            gathered = collectives.all_gather(self.x, self.gather_dim, self.world_size, self.group)
        x_MK = gathered.reshape(-1, gathered.shape[-1])
        ups = [collectives.sum_of_gemms([x_MK], [w], b) for w, b in zip(self.w_up, self.bias_up, strict=True)]
        parts = list(ups[0].chunk(2, -1)) if self._packed else ups
        hidden_MH = collectives.activate(parts[0], self.activation)
        if self.gated:
            hidden_MH = hidden_MH * parts[1]
        y = collectives.sum_of_gemms([hidden_MH], [self.w_down], self.bias_down)
        if self.scatter_dim < 0:
            y = collectives.all_reduce(y, self.reduce_op, self.group)
        else:
            y = collectives.reduce_scatter(
                y.reshape(self.shape), self.scatter_dim, self.reduce_op, self.world_size, self.group
            )
        # an operator's output must not be its input
        saveable = [
            gathered if self.gather_dim >= 0 else gathered.clone() if self.saved[0] else gathered,
            *ups,
            hidden_MH,
        ]
        return [y, *(tensor for tensor, wanted in zip(saveable, self.saved, strict=True) if wanted)]

    def fake(self) -> list[Tensor]:
        """Empty y and saved tensors."""
        gathered = self._gathered_shape()
        rows, width = prod(gathered[:-1]), self.w_up[0].shape[1]
        if self.scatter_dim < 0:
            y_shape = [rows, self.w_down.shape[1]]
        else:
            y_shape = [s // self.world_size if i == self.scatter_dim else s for i, s in enumerate(self.shape)]
        saveable = [gathered, *([rows, width] for _ in self.w_up), [rows, self.w_down.shape[0]]]
        wanted = [shape for shape, keep in zip(saveable, self.saved, strict=True) if keep]
        return [self.x.new_empty(shape) for shape in [y_shape, *wanted]]

    def problem(self) -> Problem:
        """m rows, k input features, `hidden` features a rank, n output features."""
        gathered = self._gathered_shape()
        scattered = self.scatter_dim >= 0
        return Problem(
            operator=self.NAME,
            m=static_size(prod(gathered[:-1])),
            n=static_size(self.w_down.shape[1]),
            k=static_size(gathered[-1]),
            hidden=static_size(self.w_down.shape[0]),
            world_size=self.world_size,
            dtype=dtype_name(self.x),
            dtype_bytes=self.x.element_size(),
            outer=static_size(prod(self.shape[: self.scatter_dim])) if scattered else 1,
            dim="columns" if scattered and self.scatter_dim == len(self.shape) - 1 else "rows",
            weight_layout=common_layout([*self.w_up, self.w_down]),
            has_bias=self.bias_down is not None or any(bias is not None for bias in self.bias_up),
            reduce_op=self.reduce_op,
            activation=self.activation,
            gated=self.gated,
            returns_gathered=bool(self.saved[0]),
            gathers=self.gather_dim >= 0,
            scatters=scattered,
        )


def ffn(
    x: Tensor, w_up: Sequence[Tensor], w_down: Tensor, *, activation: str = "gelu", group: AnyGroup = None
) -> Tensor:
    """A tensor-parallel feed-forward network with its all-reduce. Inference only.

    `act(x @ w_up[0]) @ w_down`, or with two up weights, gate first, `(act(x @ w_up[0]) * (x @ w_up[1])) @ w_down`,
    summed over the group. `activation` is one of relu, relu2, gelu, gelu_tanh, silu.
    Shapes: x [.., K], w_up[i] [K, H], w_down [H, N] (Linear weights transposed, `.t()`); the result [.., N] is the same
    on every rank. `group` is a name, a ProcessGroup, a one-dimensional DeviceMesh, or None for all ranks.
    Raises: OperatorInputError, GroupError, PlanMismatchError.
    """
    name = Ffn.NAME
    group_name, world_size = by_hand.group_and_size(name, group)
    x_MK = by_hand.rows(name, x)
    checks.check_tensor(name, "w_down", w_down, 2)
    call = Ffn(
        x=x_MK,
        w_up=list(w_up),
        bias_up=[None] * len(w_up),
        w_down=w_down,
        bias_down=None,
        activation=activation,
        gated=len(w_up) > 1,
        saved=[False] * (2 + len(w_up)),
        gather_dim=-1,
        shape=[x_MK.shape[0], w_down.shape[1]],
        scatter_dim=-1,
        reduce_op="sum",
        world_size=world_size,
        group=group_name,
        plan_key="",
    )
    out_MN: Tensor = by_hand.run(call)[0]
    return out_MN.reshape(*x.shape[:-1], w_down.shape[1])
