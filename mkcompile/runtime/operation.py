"""All calls of one signature: what is decided once, and the short way that each of them then takes to the driver."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mkcompile.ops.groups import find
from mkcompile.runtime import form as forms
from mkcompile.runtime.chain import LaunchChain, StreamOperations
from mkcompile.runtime.external import Blueprint
from mkcompile.runtime.form import Form
from mkcompile.runtime.gather_area import GatherArea
from mkcompile.runtime.gather_engine import EngineDevice
from mkcompile.runtime.host import Host
from mkcompile.runtime.kernel import LaunchArguments, LoadedKernel, PreparedLaunch
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.network_gather import MoverDevice
from mkcompile.runtime.recorder import Recorder
from mkcompile.runtime.reserve import GROUPS, Newest, Reserve, newest_group
from mkcompile.runtime.results import Result
from mkcompile.runtime.tensor_map import Matrix
from mkcompile.runtime.tile_schedule import TileSchedule
from mkcompile.runtime.workspace import Demand, GroupWorkspace, Workspace

_Rows = TypeVar("_Rows")
_Bias = TypeVar("_Bias")
_Result = TypeVar("_Result")
_Tensors = tuple[Sequence[Tensor], Sequence[Tensor], Tensor | None, Tensor]
#: Where the options of a call name its group.
GROUP = -2
# Argument blocks kept for each signature: one for each set of addresses that its operands have had.
_MAX_LAUNCHES = 256


@dataclass(slots=True, kw_only=True)
class Device:
    """One device: its chain of launches, the lock that guards it, the kernels that are on it, and where they write
    their timeline.
    """

    device: torch.device
    num_sms: int
    streams: StreamOperations
    chain: LaunchChain
    host: Host
    recorder: Recorder | None = None
    engine: EngineDevice | None = None
    mover: MoverDevice | None = None
    lock: threading.Lock = field(init=False)
    kernels: dict[KernelConfig, LoadedKernel] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lock = self.chain.lock


@dataclass(slots=True, kw_only=True)
class Group:
    """One group: why its ranks can't launch together (empty if they can), its workspace, and the area that copy
    engines write to.
    """

    obstacle: str
    reserve: Reserve
    workspace: GroupWorkspace
    area: GatherArea

    @property
    def held_bytes(self) -> int:
        """Symmetric memory on this rank."""
        return self.workspace.held_bytes + self.area.held_bytes


@dataclass(slots=True, kw_only=True)
class Repeatable(ABC, Generic[_Rows, _Bias, _Result]):
    """Where all calls of one signature run, and with whom: calls after the first need no more than their operands."""

    device: Device
    group: Group
    process_group: Callable[[], ProcessGroup | None]
    plan_key: str
    newest_group: Newest
    workspace: Workspace | None = None
    #: The host waits for each launch on the workspace: see `_let_end`.
    is_held: bool = False

    def _let_end(self, capturing: bool) -> None:
        """Over nodes with a proxy that calls the driver a launch ends before its caller goes on. What comes behind it
        may have code to load or memory to get, for which the driver waits for all kernels and holds up the proxy's
        calls, for which this launch waits. Source: docs/decisions/404-queues-of-the-device.md.
        """
        if not capturing:
            self.group.workspace.backing.settle()

    @abstractmethod
    def run(self, x: _Rows, w: Sequence[Tensor], bias: _Bias) -> _Result | None:
        """On the current stream of the operands' device."""

    def again(self, x: _Rows, w: Sequence[Tensor], bias: _Bias, *options: Any) -> _Result | None:
        """A call like the first, its options included; None where the group's name is another group's now.

        Raises: as `run`, and what an earlier launch has reported.
        """
        try:
            if self.process_group() is not find(options[GROUP]):
                return None
        except (RuntimeError, KeyError, ValueError):  # no group has the name: what the long way says of it
            return None
        self.group.workspace.board.check()
        return self.run(x, w, bias)


@dataclass(slots=True, kw_only=True)
class Operation(Repeatable[Sequence[Tensor], Tensor | None, Tensor]):
    """All calls of one signature. `launches` are the argument blocks by the operands' addresses; `model` is one of
    operands that were read in place, of which those of other addresses are made. `blueprint` is that of results which
    peers store into, and `otherwise` the operation for calls that find no room for theirs: ready from the start, since
    a capture, where room may be lacking first, can neither load a kernel nor make a workspace. `adds`: each call is
    given a residual, to which the kernel adds its result.
    """

    form: Form
    kernel: LoadedKernel
    schedule: TileSchedule
    demand: Demand
    allocate: Callable[[], Tensor]
    blueprint: Blueprint | None = None
    otherwise: Operation | None = None
    adds: bool = False
    model: PreparedLaunch | None = None
    launches: dict[tuple[int, ...], PreparedLaunch] = field(default_factory=dict)

    def fall_back_to(self, otherwise: Operation) -> None:
        """For calls without room; the workspace serves both."""
        self.otherwise = otherwise
        self.demand = otherwise.demand = self.demand.joined(otherwise.demand)

    def adding(self) -> Operation:
        """The same launches, which add to a residual."""
        return replace(self, adds=True, workspace=None, model=None, launches={})

    def run(
        self, x: Sequence[Tensor], w: Sequence[Tensor], bias: Tensor | None, residual: Tensor | None = None
    ) -> Tensor | None:
        """On the current stream of the operands' device; None where there is no room and no operation `otherwise`.
        The result is new memory or, of an operation that `adds`, the residual.

        Raises: WorkspaceError, PeerTimeoutError, UnsupportedDeviceError, DriverError.
        """
        device, host = self.device, self.device.host
        if host.current_device() != host.device_idx:
            with torch.cuda.device(device.device):
                return self.run(x, w, bias, residual)
        if self.newest_group() is not next(reversed(GROUPS), None):
            with device.lock:
                self._notice_groups()
        if self.blueprint is not None:
            return self._run_planned(self.blueprint, x, w, bias)
        out = self.allocate() if residual is None else residual
        addresses = _addresses(x, w, bias, out)
        with device.lock:
            stream = host.current_stream()
            capture = device.chain.enter(stream)
            current = self.group.workspace.current
            if self.workspace is not current or current is None or current.slot.failed or capture:
                self._bind(stream, capture != 0)
            launch = self.launches.get(addresses)
            if launch is None:
                self._launch_new((x, w, bias, out), addresses, stream, capture != 0)
            else:
                launch.run(stream, capture != 0)
            if self.is_held:
                self._let_end(capture != 0)
            if capture or device.chain.has_events:
                device.chain.leave(stream, capture)
        return out

    def _run_planned(
        self, blueprint: Blueprint, x: Sequence[Tensor], w: Sequence[Tensor], bias: Tensor | None
    ) -> Tensor | None:
        """Into a result that peers store into, where there is room for one."""
        device = self.device
        with device.lock:
            stream = device.host.current_stream()
            capture = device.chain.enter(stream)
            current = self.group.workspace.current
            if self.workspace is not current or current is None or current.slot.failed or capture:
                self._bind(stream, capture != 0)
            workspace = self.workspace
            assert workspace is not None
            result = workspace.results.take(blueprint, stream, capture)
            if workspace is not self.group.workspace.current:
                result = self._take_again(blueprint, stream, capture)
            if result is not None:
                out = result.tensor
                addresses = _addresses(x, w, bias, out)
                launch = self.launches.get(addresses)
                if launch is None:
                    self._launch_new((x, w, bias, out), addresses, stream, capture != 0, result)
                else:
                    launch.run(stream, capture != 0)
                if capture or device.chain.has_events:
                    device.chain.leave(stream, capture)
                return out
        return None if self.otherwise is None else self.otherwise.run(x, w, bias)

    def _take_again(self, blueprint: Blueprint, stream: int, capture: int) -> Result | None:
        """There is another workspace since ranks were waited for: a result of that."""
        while True:
            self._bind(stream, capture != 0)
            workspace = self.workspace
            assert workspace is not None
            result = workspace.results.take(blueprint, stream, capture)
            if workspace is self.group.workspace.current:
                return result

    def _notice_groups(self) -> None:
        """There are other groups than before, whose collectives may need room. Grids may differ by rank."""
        self.newest_group = newest_group()
        group = self.process_group()
        if group is None or self.kernel.config.streams:
            return
        max_grid = max(1, self.device.num_sms - self.group.reserve.sms_now(self.plan_key, group))
        if max_grid < self.schedule.grid:
            self.schedule = replace(self.schedule, grid=max_grid)
            self._forget_launches()

    def _forget_launches(self) -> None:
        self.launches.clear()
        self.model = None

    def _bind(self, stream: int, capturing: bool) -> None:
        workspace = self.group.workspace.require(self.demand, stream, capturing)
        if workspace is not self.workspace:
            self.workspace, self.is_held = workspace, workspace.is_held
            self._forget_launches()

    def _launch_new(
        self, tensors: _Tensors, addresses: tuple[int, ...], stream: int, captured: bool, result: Result | None = None
    ) -> None:
        """Launch from addresses that were not seen before; operands that can't be read in place are copied first."""
        outs, outs_offset = ((), -1) if result is None else (result.outs, result.offset)
        if self.model is not None and not any(address % forms.ALIGNED_BYTES for address in addresses):
            launch = self.model.moved(addresses, outs, outs_offset)
            if result is not None:
                self.group.workspace.board.describe(launch.identity)
            launch.run(stream, captured)
            self._keep(addresses, launch)
            return
        given_x, given_w, given_bias, out = tensors
        x = [forms.as_rows(x_MK) for x_MK in given_x]
        w = [forms.as_weight(w_KN, self.form.config.weight_layout) for w_KN in given_w]
        bias = None if given_bias is None else forms.as_vector(given_bias)
        arguments = self._arguments(x, w, bias, out)
        if result is not None and arguments.peers is not None:
            arguments = replace(arguments, peers=replace(arguments.peers, outs=outs, outs_offset=outs_offset))
        launch = PreparedLaunch(self.kernel, arguments)
        self.group.workspace.board.describe(launch.identity)
        launch.run(stream, captured)
        if _addresses(x, w, bias, out) == addresses:
            self._keep(addresses, launch)
            self.model = launch

    def _keep(self, addresses: tuple[int, ...], launch: PreparedLaunch) -> None:
        if len(self.launches) >= _MAX_LAUNCHES:
            self.launches.clear()
        self.launches[addresses] = launch

    def _arguments(self, x: list[Tensor], w: list[Tensor], bias: Tensor | None, out: Tensor) -> LaunchArguments:
        assert self.workspace is not None
        return LaunchArguments(
            terms=tuple((Matrix.of(x_MK), Matrix.of(weight)) for x_MK, weight in zip(x, w, strict=True)),
            out=Matrix.of(out.view(self.form.out_rows, self.form.out_shape[-1])),
            schedule=self.schedule,
            peers=self.group.workspace.peers(self.workspace),
            bias=0 if bias is None else bias.data_ptr(),
            segments=self.form.size.segments,
            scale=self.form.scale,
            trace=self.device.recorder,
            adds=self.adds,
        )


def _addresses(x: Sequence[Tensor], w: Sequence[Tensor], bias: Tensor | None, out: Tensor) -> tuple[int, ...]:
    if len(x) == 1 and bias is None:
        return x[0].data_ptr(), w[0].data_ptr(), out.data_ptr()
    present = (*x, *w, out) if bias is None else (*x, *w, out, bias)
    return tuple(tensor.data_ptr() for tensor in present)
