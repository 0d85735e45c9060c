"""The registry of operators: what each one means, and the one seam through which a device may take a call over."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Protocol

import torch

from mkcompile.errors import OperatorInputError
from mkcompile.ops.problem import Problem

_profiler_enabled = torch._C._autograd._profiler_enabled
_num_dispatch_modes = torch._C._len_torch_dispatch_stack

LIBRARY = torch.library.Library("mkcompile", "DEF")  # type: ignore[no-untyped-call]


class Call(Protocol):
    """One call of an operator: a frozen dataclass whose fields are the schema's arguments, in order; the first one is
    the activation, a tensor or several of one row count, or what the operator adds to.

    `check` raises OperatorInputError or GroupError; `reference` computes the result with ATen and functional
    collectives on any device; `fake` gives shapes only; `problem` is the size that plans are made for. An operator that
    works in place has no result in its schema; here and for the launcher its result is what it has changed.
    """

    NAME: ClassVar[str]
    SCHEMA: ClassVar[str]

    @property
    def group(self) -> str: ...
    @property
    def plan_key(self) -> str: ...
    @property
    def world_size(self) -> int: ...
    def check(self) -> None: ...
    def reference(self) -> Any: ...
    def fake(self) -> Any: ...
    def problem(self) -> Problem: ...


Launcher = Callable[[Call], Any]
#: Takes an operator's arguments as torch passes them. Returns the result, or None to have the call made and launched.
Shortcut = Callable[..., Any]


class ShortcutLauncher(ABC):
    """A launcher with a short way for calls like those that it has taken before: no `Call` is made for them."""

    @abstractmethod
    def __call__(self, call: Call) -> Any:
        """The result, or None where the reference is to compute it."""

    @abstractmethod
    def shortcut(self, call_type: type[Call]) -> Shortcut | None:
        """The short way of one operator; asked once, when the launcher is installed."""

    def shortcut_like(self, call: Call) -> Shortcut | None:
        """The short way of calls that differ from this one, which has been made, in nothing but addresses."""
        return None


@dataclass(slots=True)
class _Operator:
    call_type: type[Call]
    shortcut: Shortcut | None = None

    def run(self, *args: Any) -> Any:
        """A call with real tensors: by the launcher, else by the reference."""
        shortcut = self.shortcut
        if shortcut is not None:
            result = shortcut(*args)
            if result is not None:
                return result
        return _launch(self.call_type(*args))

    def run_in_place(self, *args: Any) -> None:
        """The same, as the dispatcher wants it of an operator without a result."""
        self.run(*args)


@dataclass(slots=True)
class _Registry:
    operators: dict[str, _Operator] = field(default_factory=dict)
    launcher: Launcher | None = None

    def connect(self, operator: _Operator) -> None:
        """Give an operator the launcher's short way, if there is one."""
        launcher = self.launcher
        operator.shortcut = launcher.shortcut(operator.call_type) if isinstance(launcher, ShortcutLauncher) else None


_REGISTRY = _Registry()


def _launch(call: Call) -> Any:
    launcher = _REGISTRY.launcher
    result = launcher(call) if launcher is not None else None
    if result is not None:
        return result
    call.check()
    return call.reference()


def register(call_type: type[Call]) -> type[Call]:
    """Class decorator: define `mkcompile::<NAME>` in torch, with its fake, for CPU and CUDA tensors."""

    operator = _Operator(call_type)

    def fake(*args: Any) -> Any:
        call = call_type(*args)
        call.check()
        return call.fake()

    def refuse(*args: Any) -> Any:
        """A call with sparse tensors, for which no kernel could be found."""
        call_type(*args).check()
        raise OperatorInputError(f"{call_type.NAME}: give dense (strided) tensors")

    schema = call_type.NAME + call_type.SCHEMA
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    run = operator.run_in_place if schema.endswith("-> ()") else operator.run
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(call_type.NAME, run, device)  # type: ignore[no-untyped-call]
        for layout in ("Sparse", "SparseCsr"):
            LIBRARY.impl(call_type.NAME, refuse, layout + device)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"mkcompile::{call_type.NAME}", fake, lib=LIBRARY)
    _REGISTRY.operators[call_type.NAME] = operator
    _REGISTRY.connect(operator)
    return call_type


def overload(call_type: type[Call]) -> torch._ops.OpOverload:
    """`torch.ops.mkcompile.<NAME>.default`."""
    found: torch._ops.OpOverload = getattr(torch.ops.mkcompile, call_type.NAME).default
    return found


def arguments(call: Call) -> tuple[Any, ...]:
    """The call's fields in schema order."""
    return tuple(getattr(call, one.name) for one in fields(call))  # type: ignore[arg-type]


def call_types() -> dict[str, type[Call]]:
    """All registered operators by name."""
    return {name: operator.call_type for name, operator in _REGISTRY.operators.items()}


class Site:
    """One call in code that Inductor generated: below torch's dispatcher, to which a custom operator costs about 5 us.
    An operator that works in place may return what it has changed: nothing reads it.

    `fixed`: all of its calls have tensors of the same shapes and strides, so that nothing of them need be looked up.
    Profilers and dispatch modes see the call as without this.
    """

    __slots__ = ("_call_type", "_fixed", "_launcher", "_overload", "_run", "_shortcut")

    def __init__(self, operator: str, *, fixed: bool) -> None:
        known = _REGISTRY.operators[operator]
        self._call_type, self._run, self._fixed = known.call_type, known.run, fixed
        self._overload = overload(known.call_type)
        self._launcher: Launcher | None = None
        self._shortcut: Shortcut | None = None

    def __call__(self, *args: Any) -> Any:
        """As the operator. Raises: as the operator."""
        if _profiler_enabled() or _num_dispatch_modes():
            return self._overload(*args)
        shortcut = self._shortcut
        if shortcut is not None and self._launcher is _REGISTRY.launcher:
            result = shortcut(*args)
            if result is not None:
                return result
        result = self._run(*args)
        if self._fixed and (shortcut is not None or self._launcher is not _REGISTRY.launcher):
            self._ask(self._call_type(*args))
        return result

    def _ask(self, call: Call) -> None:
        """Once for each launcher, and again when what it said does not hold any more."""
        launcher = self._launcher = _REGISTRY.launcher
        self._shortcut = launcher.shortcut_like(call) if isinstance(launcher, ShortcutLauncher) else None


def set_launcher(launcher: Launcher | None) -> None:
    """Install (or with None remove) the runtime's launcher.

    It is given every call that carries real tensors, and returns the result, or None where the reference is to
    compute it. A `ShortcutLauncher` may return the results of later calls before a `Call` is made.
    """
    _REGISTRY.launcher = launcher
    for operator in _REGISTRY.operators.values():
        _REGISTRY.connect(operator)


def launcher() -> Launcher | None:
    """The one that is installed."""
    return _REGISTRY.launcher
