"""What the operators' public functions share: calls by hand, outside a compiled graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mkcompile.errors import OperatorInputError
from mkcompile.ops import checks
from mkcompile.ops.groups import AnyGroup, find, name_of
from mkcompile.ops.registry import Call, arguments, overload


def group_and_size(operator: str, group: AnyGroup) -> tuple[str, int]:
    """The group's name and its number of ranks.

    Raises: GroupError.
    """
    name = name_of(operator, group)
    return name, find(name).size()


def rows(operator: str, x: Tensor) -> Tensor:
    """All leading dimensions as one. Shapes: [.., K] -> [M, K].

    Raises: OperatorInputError for what has no rows.
    """
    checks.check_tensor(operator, "x", x)
    if x.dim() < 2:
        raise OperatorInputError(f"{operator}: x has shape {tuple(x.shape)}; give at least two dimensions, [.., K]")
    return x.reshape(-1, x.shape[-1])


def run(call: Call) -> Any:
    """Check the call, then make it.

    Raises: OperatorInputError, GroupError, PlanMismatchError.
    """
    _refuse_gradients(call.NAME, _tensors(arguments(call)))
    call.check()
    return overload(type(call))(*arguments(call))


def _tensors(args: Iterable[Any]) -> Iterable[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from _tensors(arg)


def _refuse_gradients(operator: str, tensors: Iterable[Tensor]) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise OperatorInputError(
            f"{operator}: an input requires gradients, and the operator alone has no backward; call it under "
            "torch.no_grad(), or write matmul and collective apart and compile them with backend='mkernel'"
        )
