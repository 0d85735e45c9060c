"""The way of one operator call at run time: check and agree the first time, then a kernel if there is one for it.

`Dispatch` is what `ops.registry.set_launcher` gets. It returns the result, or None where the operator's reference is
to compute it. Calls that a kernel has taken before go by the kernel source's short way, which this file is not on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import fields
from operator import attrgetter
from typing import Any

from torch import Tensor

from mkcompile.ops.registry import Call, Shortcut, ShortcutLauncher
from mkcompile.plan import key
from mkcompile.runtime.agree import Agreement

# The result of the call by a fused kernel, or None where there is none for it. Decides by what all ranks share.
KernelSource = Callable[[Call], Any]


class Dispatch(ShortcutLauncher):
    """Agreement first, so that a launch that the ranks do not share never starts; then the kernel sources in order."""

    def __init__(
        self, agreement: Agreement, kernels: KernelSource | None = None, network: KernelSource | None = None
    ) -> None:
        """`network`: asked before `kernels`; for calls on CPU tensors over several nodes."""
        self._agreement = agreement
        self._kernels = kernels
        self._network = network
        self._leading: dict[type[Call], Callable[[Call], Any]] = {}

    def __call__(self, call: Call) -> Any | None:
        """Raises: PlanMismatchError; OperatorInputError and GroupError, before anything is launched; as the sources."""
        signature = self._signature(call)
        if not self._agreement.holds(call.group, signature):
            call.check()
            problem = call.problem()
            facts = "".join(f",{fact}" for fact in sorted(key.facts_of(call.plan_key)))
            self._agreement.reach(call.group, signature, f"{call.NAME} m={problem.m},{problem.key()}{facts}")
        result = None if self._network is None else self._network(call)
        if result is not None or self._kernels is None:
            return result
        return self._kernels(call)

    @property
    def kernels(self) -> KernelSource | None:
        """What calls are offered to."""
        return self._kernels

    def shortcut(self, call_type: type[Call]) -> Shortcut | None:
        """The kernel source's own: it knows only calls that came to it from here, so the ranks have agreed on them."""
        return self._kernels.shortcut(call_type) if isinstance(self._kernels, ShortcutLauncher) else None

    def shortcut_like(self, call: Call) -> Shortcut | None:
        """The kernel source's own, as above."""
        return self._kernels.shortcut_like(call) if isinstance(self._kernels, ShortcutLauncher) else None

    def _signature(self, call: Call) -> Hashable:
        """What distinguishes calls that need an agreement of their own; cheap where the graph carries a plan key."""
        leading = self._leading.get(type(call))
        if leading is None:
            leading = self._leading[type(call)] = attrgetter(fields(call)[0].name)  # type: ignore[arg-type]
        x = leading(call)
        shape = x.shape if isinstance(x, Tensor) else x[0].shape
        if call.plan_key:
            return call.NAME, call.plan_key, shape
        call.check()
        return call.NAME, call.problem().key(), shape
