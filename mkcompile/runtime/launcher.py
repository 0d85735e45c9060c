"""The kernel source of `dispatch`: an operator call on CUDA tensors becomes one launch on the current stream.

The first call of a signature decides and compiles (`Operation`); later calls come by `shortcut`, without a `Call`, and
do a look-up, the result's allocation and a launch. Results are ordinary memory of the allocator, or symmetric memory
where peers store into them (`results.py`). All work is on the current stream: no tensor is recorded on another one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mkcompile.config import settings
from mkcompile.ops.all_gather_gemm import AllGatherGemm, completed, of_form_input
from mkcompile.ops.gemm_all_reduce import GemmAllReduce, GemmAllReduceAdd
from mkcompile.ops.gemm_reduce_scatter import GemmReduceScatter, GemmReduceScatterAdd
from mkcompile.ops.groups import find
from mkcompile.ops.registry import Call, Shortcut, ShortcutLauncher, arguments
from mkcompile.runtime import form as forms
from mkcompile.runtime.adding import Adding, ReductionAdd, layout_of
from mkcompile.runtime.external import Blueprint
from mkcompile.runtime.form import Form, Reduction
from mkcompile.runtime.gather_form import GatherForm, gather_form_of
from mkcompile.runtime.gather_operation import GatherOperation, room_missing
from mkcompile.runtime.host import contiguous_strides
from mkcompile.runtime.machine import own_basis
from mkcompile.runtime.network_form import over_nodes
from mkcompile.runtime.operation import GROUP, Device, Group, Operation
from mkcompile.runtime.platform import CudaPlatform, Platform
from mkcompile.runtime.recorder import RankTrace
from mkcompile.runtime.resources import Resources
from mkcompile.runtime.tactics import Planned, Tactic, Tactics
from mkcompile.runtime.workspace import Demand

_LOG = logging.getLogger(__name__)
# Signatures kept: dynamic shapes make new ones without end.
_MAX_OPERATIONS = 4096


@dataclass(frozen=True, slots=True)
class _Unfused:
    """Calls of a signature that the reference computes; no `process_group` where that holds for every group."""

    process_group: Callable[[], ProcessGroup | None] | None = None


_Decision = Operation | GatherOperation | Adding | _Unfused


@dataclass(frozen=True, slots=True)
class _Mixed:
    """The short way of gathers with products that no kernel makes. `short`: of the part that kernels make."""

    short: Shortcut
    forms: tuple[int, ...]
    returned: bool

    def __call__(
        self, x: Tensor, w: Sequence[Tensor], bias: Sequence[Tensor | None], forms: Sequence[int], *options: Any
    ) -> list[Tensor] | None:
        """As a call, None where there is anything to decide. Raises: as a call."""
        made = self.short(x, of_form_input(w, self.forms), of_form_input(bias, self.forms), forms, *options)
        return None if made is None else completed(made, w, self.forms, self.returned)


class Launcher(ShortcutLauncher):
    """All fused launches of this process. Called with every operator call; None leaves it to the reference."""

    def __init__(
        self, platform: Platform | None = None, tactics: Tactics | None = None, trace: bool | None = None
    ) -> None:
        """`trace`: kernels write their timelines; None: as the settings say."""
        self._platform: Platform = platform or CudaPlatform()
        self._tactics: Tactics = tactics or Planned(own_basis)
        self._trace = settings().trace if trace is None else trace
        self._resources = Resources(self._platform, self._trace, on_end=self._forget)
        self._operations: dict[Hashable, _Decision] = {}

    def __call__(self, call: Call) -> Any | None:
        """The result of the call, or None where no kernel takes it: the same answer on every rank.

        Raises: PeerTimeoutError, LaunchOrderError or KernelFaultError for what an earlier launch has reported;
        WorkspaceError; CompileError; DriverError.
        """
        self.check()
        if isinstance(call, ReductionAdd):
            adding = self._adding(call)
            return adding.run(call.residual, call.x, call.w, call.bias) if isinstance(adding, Adding) else None
        if not isinstance(call, (GemmReduceScatter, GemmAllReduce, AllGatherGemm)):
            return None
        if (part := _part_of_kernels(call)) is not None:
            assert isinstance(call, AllGatherGemm)
            made = self(part)
            return None if made is None else completed(made, call.w, call.forms, call.return_gathered)
        operation = self._decision(call)
        if isinstance(operation, (Operation, GatherOperation)):
            return operation.run(call.x, call.w, call.bias)  # type: ignore[arg-type]
        return None

    def shortcut(self, call_type: type[Call]) -> Shortcut | None:
        """For calls that differ from an earlier one in nothing but addresses."""
        if call_type is GemmAllReduce:
            return self._again
        if call_type is AllGatherGemm:
            return self._gather
        if call_type is GemmAllReduceAdd:
            return self._add
        if call_type is GemmReduceScatterAdd:
            return self._add_scattered
        return self._reduce_scatter if call_type is GemmReduceScatter else None

    def shortcut_like(self, call: Call) -> Shortcut | None:
        """Without a look-up by shapes: the caller answers for them."""
        if isinstance(call, ReductionAdd):
            adding = self._operations.get(_signature_of(call))
            return adding.again if isinstance(adding, Adding) else None
        if not isinstance(call, (GemmReduceScatter, GemmAllReduce, AllGatherGemm)):
            return None
        if (part := _part_of_kernels(call)) is not None:
            assert isinstance(call, AllGatherGemm)
            short = self.shortcut_like(part)
            return None if short is None else _Mixed(short, tuple(call.forms), call.return_gathered)
        operation = self._operations.get(_signature_of(call))
        return operation.again if isinstance(operation, (Operation, GatherOperation)) else None

    def _gather(
        self, x: Tensor, w: Sequence[Tensor], bias: Sequence[Tensor | None], forms: Sequence[int], *options: Any
    ) -> list[Tensor] | None:
        """As a call, but None also where there is anything to decide. Raises: as a call."""
        operation = self._operations.get(gather_signature(x, w, bias, (tuple(forms), *options)))
        return operation.again(x, w, bias, *options) if isinstance(operation, GatherOperation) else None

    def _reduce_scatter(
        self, x: Sequence[Tensor], w: Sequence[Tensor], bias: Tensor | None, shape: Sequence[int], *options: Any
    ) -> Tensor | None:
        return self._again(x, w, bias, tuple(shape), *options)

    def _again(self, x: Sequence[Tensor], w: Sequence[Tensor], bias: Tensor | None, *options: Any) -> Tensor | None:
        """As a call, but None also where there is anything to decide. Raises: as a call."""
        operation = self._operations.get(_signature(x, w, bias, options))
        if not isinstance(operation, Operation):
            return None
        try:
            if operation.process_group() is not find(options[GROUP]):
                return None
        except (RuntimeError, KeyError, ValueError):  # no group has the name: what the long way says of it
            return None
        operation.group.workspace.board.check()
        return operation.run(x, w, bias)

    def _add_scattered(
        self, residual: Tensor, x: Sequence[Tensor], w: Sequence[Tensor], bias: Tensor | None, shape: Sequence[int],
        *options: Any,
    ) -> Tensor | None:  # fmt: skip
        return self._add(residual, x, w, bias, tuple(shape), *options)

    def _add(
        self, residual: Tensor, x: Sequence[Tensor], w: Sequence[Tensor], bias: Tensor | None, *options: Any
    ) -> Tensor | None:
        """As a call, but None also where there is anything to decide. Raises: as a call."""
        adding = self._operations.get(_signature(x, w, bias, (layout_of(residual), *options)))
        return adding.again(residual, x, w, bias, *options) if isinstance(adding, Adding) else None

    def check(self) -> None:
        """Raises: what launches have reported so far, as the next operator call would."""
        if self._resources.board is not None:
            self._resources.board.check()

    def traces(self, rank: int) -> list[RankTrace]:
        """What the kernels of each device have recorded; empty where nothing is traced. The devices must be idle."""
        return [one.recorder.read(rank) for one in self._resources.devices.values() if one.recorder is not None]

    def clear_traces(self) -> None:
        """Forget what was recorded."""
        for one in self._resources.devices.values():
            if one.recorder is not None:
                one.recorder.clear()

    def held_bytes(self) -> int:
        """Symmetric memory that this process holds, over all groups."""
        return self._resources.held_bytes

    def _decision(self, call: Reduction | AllGatherGemm) -> _Decision:
        """What holds for calls like this one."""
        signature = _signature_of(call)
        operation = self._operations.get(signature)
        if operation is None or not _holds(operation, call.group):
            operation = self._decide(call, signature)
        return operation

    def _adding(self, call: ReductionAdd) -> _Decision:
        """The same, from what holds for the sum alone. Raises: OperatorInputError for a residual that does not fit."""
        signature = _signature_of(call)
        known = self._operations.get(signature)
        if known is not None and _holds(known, call.group):
            return known
        call.check_residual()
        plain = self._decision(call.addend())
        adding = Adding.like(plain) if isinstance(plain, Operation) else plain
        self._keep(signature, adding)
        return adding

    def _keep(self, signature: Hashable, operation: _Decision) -> None:
        if len(self._operations) >= _MAX_OPERATIONS:
            self._operations.clear()
        self._operations[signature] = operation

    def _decide(self, call: Reduction | AllGatherGemm, signature: Hashable) -> _Decision:
        """Collective where the group or the plan is new: one thread of a group at a time, others are not held up."""
        form = self._form(call)
        with self._resources.meeting(call.group, _device_of(call)):
            known = self._operations.get(signature)
            if known is not None and _holds(known, call.group):
                return known
            if isinstance(form, str):
                _LOG.info("%s runs unfused: %s", call.NAME, form)
                operation: _Decision = _Unfused()
            elif isinstance(call, AllGatherGemm):
                assert isinstance(form, GatherForm)
                operation = self._prepare_gather(call, form)
            else:
                assert isinstance(form, Form)
                operation = self._prepare(call, form)
            self._keep(signature, operation)
            return operation

    def _prepare(self, call: Reduction, form: Form) -> Operation | _Unfused:
        device = self._resources.device(_device_of(call))
        group = self._resources.group(call.group, device.device)
        if group.obstacle:
            return _Unfused(group.workspace.exchange.group)
        self._resources.let_held_launches_end()
        max_grid = _max_grid(device, group, call)
        form = replace(form, config=over_nodes(form.config, group.workspace.network))
        tactic = self._tactics(call, form, max_grid)
        if tactic is None:
            _LOG.info("%s of %s runs unfused: no gain is predicted", call.NAME, form.size)
            return _Unfused(group.workspace.exchange.group)
        if tactic[0].broadcast != "direct":
            return self._operation(call, form, tactic, (device, group))
        staged = forms.staged(form)
        other = self._tactics(call, staged, max_grid)
        if other is not None:
            self._platform.compile([replace(one, trace=self._trace) for one, _ in (tactic, other)])
        operation = self._operation(call, form, tactic, (device, group))
        if other is not None:
            operation.fall_back_to(self._operation(call, staged, other, (device, group)))
        return operation

    def _operation(self, call: Reduction, form: Form, tactic: Tactic, where: tuple[Device, Group]) -> Operation:
        (config, schedule), (device, group) = tactic, where
        config = replace(config, trace=self._trace)
        result = form.out_shape, contiguous_strides(form.out_shape), call.x[0].dtype
        return Operation(
            form=replace(form, config=config),
            kernel=self._resources.kernel(config, device),
            schedule=schedule,
            demand=Demand.of(config, schedule, form.size, group.workspace.nodes),
            device=device,
            group=group,
            allocate=partial(device.host.empty, *result),
            process_group=group.workspace.exchange.group,
            plan_key=call.plan_key,
            newest_group=group.reserve.newest,
            blueprint=Blueprint(*result, device.device) if config.broadcast == "direct" else None,
        )

    def _form(self, call: Reduction | AllGatherGemm) -> Form | GatherForm | str:
        device = _device_of(call)
        if device.type != self._platform.device_type:
            return f"tensors on {device.type}"
        return gather_form_of(call) if isinstance(call, AllGatherGemm) else forms.form_of(call)

    def _prepare_gather(self, call: AllGatherGemm, form: GatherForm) -> GatherOperation | _Unfused:
        device = self._resources.device(_device_of(call))
        group = self._resources.group(call.group, device.device)
        if group.obstacle:
            return _Unfused(group.workspace.exchange.group)
        self._resources.let_held_launches_end()
        form = replace(form, config=over_nodes(form.config, group.workspace.network))
        choice = self._tactics.gather(call, form, _max_grid(device, group, call))
        if choice is None:
            _LOG.info("%s of %s runs unfused: no gain is predicted", call.NAME, form.size)
            return _Unfused(group.workspace.exchange.group)
        shortage = room_missing(choice, form.size, group)
        if shortage:
            _LOG.warning("%s of %s runs unfused: %s", call.NAME, form.size, shortage)
            return _Unfused(group.workspace.exchange.group)
        config = replace(choice.config, trace=self._trace)
        return GatherOperation(
            form=form,
            choice=choice,
            kernel=None if choice.variant == "library" else self._resources.kernel(config, device),
            engine=self._resources.engine(device) if choice.variant in ("copy_engine", "library") else None,
            mover=self._resources.mover(device) if choice.variant == "network" else None,
            device=device,
            group=group,
            process_group=group.workspace.exchange.group,
            plan_key=call.plan_key,
            newest_group=group.reserve.newest,
        )

    def _forget(self, group: Group) -> None:
        """The process group has ended; another one has its name."""
        known = list(self._operations.items())
        for key in [key for key, one in known if not isinstance(one, _Unfused) and one.group is group]:
            self._operations.pop(key, None)


def _holds(operation: _Decision, name: str) -> bool:
    """Is the decision about the group that has this name now?"""
    group = operation.process_group
    return group is None or group() is find(name)


def _part_of_kernels(call: Call) -> AllGatherGemm | None:
    """What kernels make of a gather whose other products they don't make."""
    return call.of_kernels() if isinstance(call, AllGatherGemm) else None


def _signature_of(call: Reduction | ReductionAdd | AllGatherGemm) -> Hashable:
    if isinstance(call, AllGatherGemm):
        return gather_signature(call.x, call.w, call.bias, (tuple(call.forms), *arguments(call)[4:]))
    if isinstance(call, ReductionAdd):
        return _signature(call.x, call.w, call.bias, (layout_of(call.residual), *_options(call.addend())))
    return _signature(call.x, call.w, call.bias, _options(call))


def gather_signature(
    x: Tensor, w: Sequence[Tensor], bias: Sequence[Tensor | None], options: tuple[Any, ...]
) -> Hashable:
    """All but the addresses of what an all-gather's checks, agreement and launch depend on."""
    parts: list[Hashable] = [options]
    for tensor in (x, *w, *bias):
        parts.append(None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()))
    return tuple(parts)


def _device_of(call: Reduction | AllGatherGemm) -> torch.device:
    return (call.x if isinstance(call, AllGatherGemm) else call.x[0]).device


def _max_grid(device: Device, group: Group, call: Call) -> int:
    """Blocks of the largest launch: the same on all ranks."""
    return max(1, device.num_sms - group.reserve.sms(call.plan_key))


def _options(call: Reduction) -> tuple[Any, ...]:
    """The arguments after the tensors."""
    options = arguments(call)[3:]
    return (tuple(call.shape), *options[1:]) if isinstance(call, GemmReduceScatter) else options


def _signature(
    x: Sequence[Tensor], w: Sequence[Tensor], bias: Tensor | None, options: tuple[Any, ...]
) -> tuple[Hashable, ...]:
    """All but the addresses of what the checks, the agreement and the launch depend on."""
    if bias is None and len(x) == 1 and len(w) == 1:
        x_MK, w_KN = x[0], w[0]
        return (
            options,
            x_MK.shape, x_MK.stride(), x_MK.dtype, x_MK.get_device(),
            w_KN.shape, w_KN.stride(), w_KN.dtype, w_KN.get_device(),
        )  # fmt: skip
    parts: list[Hashable] = [len(x), bias is None, options]
    for tensor in (*x, *w) if bias is None else (*x, *w, bias):
        parts += (tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device())
    return tuple(parts)
