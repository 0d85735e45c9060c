"""The registry of operators: what each one means, and the one seam through which a device may take a call over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from mkcompile.ops.problem import Problem

LIBRARY = torch.library.Library("mkcompile", "DEF")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator: its schema in torch's schema language, and plain functions over the schema's arguments.

    `reference` computes it with ATen and functional collectives on any device; `fake` gives shapes only;
    `check` raises OperatorInputError / GroupError; `problem` extracts the size that plans are made for.
    """

    name: str
    schema: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    check: Callable[..., None]
    problem: Callable[..., Problem]

    @property
    def overload(self) -> torch._ops.OpOverload:
        """`torch.ops.mkcompile.<name>.default`."""
        overload: torch._ops.OpOverload = getattr(torch.ops.mkcompile, self.name).default
        return overload


class Launcher(Protocol):
    """The seam to the runtime: called before every operator call that carries real tensors.

    Returns the result, or None where the reference is to compute it.
    """

    def __call__(self, operator: Operator, args: tuple[Any, ...]) -> Any | None: ...


@dataclass(slots=True)
class _Registry:
    operators: dict[str, Operator] = field(default_factory=dict)
    launcher: Launcher | None = None


_REGISTRY = _Registry()


def register(operator: Operator) -> Operator:
    """Define `mkcompile::<name>` in torch, with its fake and its implementation for CPU and CUDA tensors."""
    LIBRARY.define(operator.name + operator.schema, tags=(torch.Tag.pt2_compliant_tag,))

    def implementation(*args: Any) -> Any:
        launcher = _REGISTRY.launcher
        result = launcher(operator, args) if launcher is not None else None
        if result is not None:
            return result
        operator.check(*args)
        return operator.reference(*args)

    def fake(*args: Any) -> Any:
        operator.check(*args)
        return operator.fake(*args)

    LIBRARY.impl(operator.name, implementation, "CPU")
    LIBRARY.impl(operator.name, implementation, "CUDA")
    torch.library.register_fake(f"mkcompile::{operator.name}", fake, lib=LIBRARY)
    _REGISTRY.operators[operator.name] = operator
    return operator


def operators() -> dict[str, Operator]:
    """All registered operators by name."""
    return dict(_REGISTRY.operators)


def set_launcher(launcher: Launcher | None) -> None:
    """Install (or with None remove) the runtime's launcher."""
    _REGISTRY.launcher = launcher
