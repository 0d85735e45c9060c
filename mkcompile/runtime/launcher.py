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
from mkcompile.ops.gemm_all_reduce import GemmAllReduce
from mkcompile.ops.gemm_reduce_scatter import GemmReduceScatter
from mkcompile.ops.groups import find
from mkcompile.ops.registry import Call, Shortcut, ShortcutLauncher, arguments
from mkcompile.runtime import form as forms
from mkcompile.runtime.chain import LaunchChain
from mkcompile.runtime.exchange import Exchange
from mkcompile.runtime.faults import FaultBoard
from mkcompile.runtime.form import Form, Reduction
from mkcompile.runtime.host import contiguous_strides
from mkcompile.runtime.kernel import LoadedKernel
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.machine import own_basis
from mkcompile.runtime.operation import GROUP, Device, Group, Operation
from mkcompile.runtime.platform import CudaPlatform, Platform
from mkcompile.runtime.tactics import Planned, Tactics
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
        self._operations: dict[Hashable, Operation | _Unfused] = {}
        self._board: FaultBoard | None = None
        self._lock = threading.RLock()

    def __call__(self, call: Call) -> Tensor | None:
        """The result of the call, or None where no kernel takes it: the same answer on every rank.

        Raises: PeerTimeoutError, LaunchOrderError or KernelFaultError for what an earlier launch has reported;
        WorkspaceError; CompileError; DriverError.
        """
        if self._board is not None:
            self._board.check()
        if not isinstance(call, (GemmReduceScatter, GemmAllReduce)):
            return None
        operands, options = (call.x, call.w, call.bias), _options(call)
        signature = _signature(*operands, options)
        operation = self._operations.get(signature)
        if operation is None or not _holds(operation, call.group):
            operation = self._decide(call, signature)
        if isinstance(operation, _Unfused):
            return None
        return operation.run(*operands)

    def shortcut(self, call_type: type[Call]) -> Shortcut | None:
        """For calls that differ from an earlier one in nothing but addresses."""
        if call_type is GemmAllReduce:
            return self._again
        return self._reduce_scatter if call_type is GemmReduceScatter else None

    def shortcut_like(self, call: Call) -> Shortcut | None:
        """Without a look-up by shapes: the caller answers for them."""
        if not isinstance(call, (GemmReduceScatter, GemmAllReduce)):
            return None
        operation = self._operations.get(_signature(call.x, call.w, call.bias, _options(call)))
        return operation.again if isinstance(operation, Operation) else None

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
        return sum(group.workspace.held_bytes for group in self._groups.values())

    def _decide(self, call: Reduction, signature: Hashable) -> Operation | _Unfused:
        with self._lock:
            on_device = call.x[0].device.type == self._platform.device_type
            form = forms.form_of(call) if on_device else f"tensors on {call.x[0].device.type}"
            if isinstance(form, str):
                _LOG.info("%s runs unfused: %s", call.NAME, form)
                operation: Operation | _Unfused = _Unfused()
            else:
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
        tactic = self._tactics(call, form, device.max_grid)
        if tactic is None:
            _LOG.info("%s of %s runs unfused: no gain is predicted", call.NAME, form.size)
            return _Unfused(group.workspace.exchange.group)
        config, schedule = tactic
        config = replace(config, trace=self._trace)
        return Operation(
            form=replace(form, config=config),
            kernel=self._kernel(config, device),
            schedule=schedule,
            demand=Demand.of(config, schedule, form.size),
            device=device,
            group=group,
            allocate=partial(device.host.empty, form.out_shape, contiguous_strides(form.out_shape), call.x[0].dtype),
            process_group=group.workspace.exchange.group,
        )

    def _device(self, device: torch.device) -> Device:
        found = self._devices.get(device)
        if found is None:
            max_grid = max(1, self._platform.num_sms(device) - settings().sm_reserve)
            found = self._devices[device] = Device(
                device=device,
                max_grid=max_grid,
                chain=LaunchChain(self._platform.streams(device)),
                host=self._platform.host(device),
                recorder=Recorder(device=device, num_blocks=self._platform.num_sms(device)) if self._trace else None,
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
            obstacle = self._platform.obstacle(exchange, device)
            if obstacle:
                _LOG.warning("operators of group %s run unfused: %s", name, obstacle)
            workspace = GroupWorkspace(
                exchange=exchange,
                backing=self._platform.backing(device, name),
                board=self._fault_board(device),
                cap_bytes=settings().arena_bytes,
            )
            found = self._groups[name, device] = Group(obstacle=obstacle, workspace=workspace)
        return found

    def _forget(self, group: Group) -> None:
        """The process group has ended; another one has its name."""
        gone = [key for key, one in self._operations.items() if isinstance(one, Operation) and one.group is group]
        for key in gone:
            del self._operations[key]
        group.workspace.close()

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


def _holds(operation: Operation | _Unfused, name: str) -> bool:
    """Is the decision about the group that has this name now?"""
    if isinstance(operation, _Unfused):
        return operation.process_group is None or operation.process_group() is find(name)
    return operation.process_group() is find(name)


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
