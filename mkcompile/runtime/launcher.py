"""The kernel source of `dispatch`: an operator call on CUDA tensors becomes one launch on the current stream.

The first call of a signature decides and compiles (`Operation`); later calls come by `shortcut`, without a `Call`, and
do a look-up, the result's allocation and a launch. Results are ordinary memory of the allocator and all work is on the
current stream, so no tensor needs to be recorded on another one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mkcompile.config import settings
from mkcompile.errors import WorkspaceError
from mkcompile.ops.all_gather_gemm import AllGatherGemm
from mkcompile.ops.gemm_all_reduce import GemmAllReduce
from mkcompile.ops.gemm_reduce_scatter import GemmReduceScatter
from mkcompile.ops.groups import find
from mkcompile.ops.registry import Call, Shortcut, ShortcutLauncher, arguments
from mkcompile.runtime import form as forms
from mkcompile.runtime.chain import LaunchChain
from mkcompile.runtime.exchange import Exchange
from mkcompile.runtime.external import Blueprint
from mkcompile.runtime.faults import FaultBoard
from mkcompile.runtime.form import Form, Reduction
from mkcompile.runtime.gather_area import GatherArea
from mkcompile.runtime.gather_engine import EngineDevice
from mkcompile.runtime.gather_form import GatherForm, gather_form_of
from mkcompile.runtime.gather_operation import GatherOperation, room_missing
from mkcompile.runtime.host import contiguous_strides
from mkcompile.runtime.kernel import LoadedKernel
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.machine import own_basis
from mkcompile.runtime.network_form import connect_nodes, over_nodes
from mkcompile.runtime.network_gather import MoverDevice
from mkcompile.runtime.operation import GROUP, Device, Group, Operation
from mkcompile.runtime.platform import CudaPlatform, Platform
from mkcompile.runtime.probe import Survey
from mkcompile.runtime.reserve import Reserve, newest_group, of_group
from mkcompile.runtime.tactics import Planned, Tactic, Tactics
from mkcompile.runtime.trace.record import RankTrace, Recorder
from mkcompile.runtime.workspace import WARM_UP_FIRST, Demand, GroupWorkspace

_LOG = logging.getLogger(__name__)
# Signatures kept: dynamic shapes make new ones without end.
_MAX_OPERATIONS = 4096


@dataclass(frozen=True, slots=True)
class _Unfused:
    """Calls of a signature that the reference computes; no `process_group` where that holds for every group."""

    process_group: Callable[[], ProcessGroup | None] | None = None


class Launcher(ShortcutLauncher):
    """All fused launches of this process. Called with every operator call; None leaves it to the reference."""

    def __init__(
        self, platform: Platform | None = None, tactics: Tactics | None = None, trace: bool | None = None
    ) -> None:
        """`trace`: kernels write their timelines; None: as the settings say."""
        self._platform: Platform = platform or CudaPlatform()
        self._tactics: Tactics = tactics or Planned(own_basis)
        self._trace = settings().trace if trace is None else trace
        self._devices: dict[torch.device, Device] = {}
        self._groups: dict[tuple[str, torch.device], Group] = {}
        # Groups that have ended, but whose memory captured graphs may use.
        self._ended: list[Group] = []
        self._operations: dict[Hashable, Operation | GatherOperation | _Unfused] = {}
        self._board: FaultBoard | None = None
        self._lock = threading.RLock()

    def __call__(self, call: Call) -> Any | None:
        """The result of the call, or None where no kernel takes it: the same answer on every rank.

        Raises: PeerTimeoutError, LaunchOrderError or KernelFaultError for what an earlier launch has reported;
        WorkspaceError; CompileError; DriverError.
        """
        if self._board is not None:
            self._board.check()
        if not isinstance(call, (GemmReduceScatter, GemmAllReduce, AllGatherGemm)):
            return None
        signature = _signature_of(call)
        operation = self._operations.get(signature)
        if operation is None or not _holds(operation, call.group):
            operation = self._decide(call, signature)
        if isinstance(operation, _Unfused):
            return None
        return operation.run(call.x, call.w, call.bias)  # type: ignore[arg-type]

    def shortcut(self, call_type: type[Call]) -> Shortcut | None:
        """For calls that differ from an earlier one in nothing but addresses."""
        if call_type is GemmAllReduce:
            return self._again
        if call_type is AllGatherGemm:
            return self._gather
        return self._reduce_scatter if call_type is GemmReduceScatter else None

    def shortcut_like(self, call: Call) -> Shortcut | None:
        """Without a look-up by shapes: the caller answers for them."""
        if not isinstance(call, (GemmReduceScatter, GemmAllReduce, AllGatherGemm)):
            return None
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

    def check(self) -> None:
        """Raises: what launches have reported so far, as the next operator call would."""
        if self._board is not None:
            self._board.check()

    def traces(self, rank: int) -> list[RankTrace]:
        """What the kernels of each device have recorded; empty where nothing is traced. The devices must be idle."""
        return [one.recorder.read(rank) for one in self._devices.values() if one.recorder is not None]

    def clear_traces(self) -> None:
        """Forget what was recorded."""
        for one in self._devices.values():
            if one.recorder is not None:
                one.recorder.clear()

    def held_bytes(self) -> int:
        """Symmetric memory that this process holds, over all groups."""
        return sum(_held_bytes(group) for group in (*self._groups.values(), *self._ended))

    def _decide(self, call: Reduction | AllGatherGemm, signature: Hashable) -> Operation | GatherOperation | _Unfused:
        with self._lock:
            form = self._form(call)
            if isinstance(form, str):
                _LOG.info("%s runs unfused: %s", call.NAME, form)
                operation: Operation | GatherOperation | _Unfused = _Unfused()
            elif isinstance(call, AllGatherGemm):
                assert isinstance(form, GatherForm)
                operation = self._prepare_gather(call, form)
            else:
                assert isinstance(form, Form)
                operation = self._prepare(call, form)
            if len(self._operations) >= _MAX_OPERATIONS:
                self._operations.clear()
            self._operations[signature] = operation
            return operation

    def _prepare(self, call: Reduction, form: Form) -> Operation | _Unfused:
        device = self._device(call.x[0].device)
        group = self._group(call.group, device.device)
        if group.obstacle:
            return _Unfused(group.workspace.exchange.group)
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
            kernel=self._kernel(config, device),
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
        device = (call.x if isinstance(call, AllGatherGemm) else call.x[0]).device
        if device.type != self._platform.device_type:
            return f"tensors on {device.type}"
        return gather_form_of(call) if isinstance(call, AllGatherGemm) else forms.form_of(call)

    def _prepare_gather(self, call: AllGatherGemm, form: GatherForm) -> GatherOperation | _Unfused:
        device = self._device(call.x.device)
        group = self._group(call.group, device.device)
        if group.obstacle:
            return _Unfused(group.workspace.exchange.group)
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
            kernel=None if choice.variant == "library" else self._kernel(config, device),
            engine=self._engine(device) if choice.variant in ("copy_engine", "library") else None,
            mover=self._mover(device) if choice.variant == "network" else None,
            device=device,
            group=group,
            process_group=group.workspace.exchange.group,
            plan_key=call.plan_key,
            newest_group=group.reserve.newest,
        )

    def _engine(self, device: Device) -> EngineDevice:
        if device.engine is None:
            if self._platform.is_capturing():
                raise WorkspaceError(
                    f"a CUDA graph is being captured and the copy engine is not set up; {WARM_UP_FIRST}"
                )
            device.engine = self._platform.engine(device.device, self._platform.streams(device.device))
        return device.engine

    def _mover(self, device: Device) -> MoverDevice:
        if device.mover is None:
            if self._platform.is_capturing():
                raise WorkspaceError(
                    f"a CUDA graph is being captured and the kernel that moves shards is not loaded; {WARM_UP_FIRST}"
                )
            device.mover = self._platform.mover(device.device, self._platform.streams(device.device))
        return device.mover

    def _device(self, device: torch.device) -> Device:
        found = self._devices.get(device)
        if found is None:
            streams, num_sms = self._platform.streams(device), self._platform.num_sms(device)
            found = self._devices[device] = Device(
                device=device,
                num_sms=num_sms,
                streams=streams,
                chain=LaunchChain(streams),
                host=self._platform.host(device),
                recorder=Recorder(device=device, num_blocks=num_sms) if self._trace else None,
            )
        return found

    def _group(self, name: str, device: torch.device) -> Group:
        """The group's state; a new one where the name belongs to another group than before. Collective when new."""
        process_group = find(name)
        found = self._groups.get((name, device))
        if found is not None and found.workspace.exchange.group() is not process_group:
            self._forget(found)
            found = None
        if found is None:
            exchange = Exchange(process_group, f"launch/{device.type}", settings().timeout_s)
            survey = self._platform.survey(exchange, device)
            workspace = self._workspace(name, exchange, survey, device)
            obstacle = survey.obstacle or ("" if self._platform.is_capturing() else connect_nodes(workspace))
            if obstacle:
                _LOG.warning("operators of group %s run unfused: %s", name, obstacle)
            area = GatherArea(exchange=exchange, backing=workspace.backing, cap_bytes=workspace.cap_bytes)
            found = self._groups[name, device] = Group(
                obstacle=obstacle,
                # the ranks of a fake group never come, and where nothing is launched nothing is left to others
                reserve=Reserve(has_traffic=True, given=False, newest=newest_group())
                if obstacle
                else of_group(exchange),
                workspace=workspace,
                area=area,
            )
        return found

    def _workspace(self, name: str, exchange: Exchange, survey: Survey, device: torch.device) -> GroupWorkspace:
        network, backing = None, None
        if survey.placement.num_nodes > 1 and not survey.obstacle:
            network, backing = self._platform.network(exchange, device, survey)
        return GroupWorkspace(
            exchange=exchange,
            backing=backing or self._platform.backing(device, name),
            board=self._fault_board(device),
            streams=self._device(device).streams,
            cap_bytes=settings().arena_bytes,
            network=network,
        )

    def _forget(self, group: Group) -> None:
        """The process group has ended; another one has its name."""
        fused = [item for item in self._operations.items() if not isinstance(item[1], _Unfused)]
        for key in [key for key, one in fused if one.group is group]:  # type: ignore[union-attr]
            del self._operations[key]
        group.workspace.close()
        group.area.close()
        if _held_bytes(group):
            self._ended.append(group)

    def _fault_board(self, device: torch.device) -> FaultBoard:
        if self._board is None:
            self._board = FaultBoard(self._platform.fault_memory(device))
        return self._board

    def _kernel(self, config: KernelConfig, device: Device) -> LoadedKernel:
        kernel = device.kernels.get(config)
        if kernel is None:
            if self._platform.is_capturing():
                raise WorkspaceError(
                    f"a CUDA graph is being captured and {config.name} is not loaded yet; {WARM_UP_FIRST}"
                )
            kernel = device.kernels[config] = self._platform.load(config, device.device)
        return kernel


def _holds(operation: Operation | GatherOperation | _Unfused, name: str) -> bool:
    """Is the decision about the group that has this name now?"""
    if isinstance(operation, _Unfused):
        return operation.process_group is None or operation.process_group() is find(name)
    return operation.process_group() is find(name)


def _signature_of(call: Reduction | AllGatherGemm) -> Hashable:
    if isinstance(call, AllGatherGemm):
        return gather_signature(call.x, call.w, call.bias, (tuple(call.forms), *arguments(call)[4:]))
    return _signature(call.x, call.w, call.bias, _options(call))


def gather_signature(
    x: Tensor, w: Sequence[Tensor], bias: Sequence[Tensor | None], options: tuple[Any, ...]
) -> Hashable:
    """All but the addresses of what an all-gather's checks, agreement and launch depend on."""
    parts: list[Hashable] = [options]
    for tensor in (x, *w, *bias):
        parts.append(None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()))
    return tuple(parts)


def _held_bytes(group: Group) -> int:
    """Symmetric memory of one group on this rank."""
    return group.workspace.held_bytes + group.area.held_bytes


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
