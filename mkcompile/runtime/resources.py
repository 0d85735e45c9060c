"""What launches of this process need and keep: devices, groups, loaded kernels; made when they are first asked for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.distributed import ProcessGroup

from mkcompile.config import settings
from mkcompile.errors import WorkspaceError
from mkcompile.ops.groups import find
from mkcompile.runtime.chain import LaunchChain
from mkcompile.runtime.exchange import Exchange
from mkcompile.runtime.faults import FaultBoard
from mkcompile.runtime.gather_area import GatherArea
from mkcompile.runtime.gather_engine import EngineDevice
from mkcompile.runtime.kernel import LoadedKernel
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.network_form import connect_nodes
from mkcompile.runtime.network_gather import MoverDevice
from mkcompile.runtime.operation import Device, Group
from mkcompile.runtime.platform import Platform
from mkcompile.runtime.probe import Survey
from mkcompile.runtime.recorder import Recorder
from mkcompile.runtime.reserve import Reserve, newest_group, of_group
from mkcompile.runtime.symmetric import BehindOthers
from mkcompile.runtime.workspace import WARM_UP_FIRST, GroupWorkspace

_LOG = logging.getLogger(__name__)
_Key = tuple[str, torch.device]


@dataclass(slots=True)
class Resources:
    """Of one process. `on_end` is told of a group that has ended, when the next new one is looked up.

    The one lock guards what is here and is never held while other ranks are waited for: another thread may be deciding
    for another group, whose ranks may have come in another order.
    """

    platform: Platform
    is_traced: bool
    on_end: Callable[[Group], None]
    board: FaultBoard | None = None
    devices: dict[torch.device, Device] = field(default_factory=dict)
    groups: dict[_Key, Group] = field(default_factory=dict)
    #: Groups that have ended, but whose memory captured graphs or living results use.
    ended: list[Group] = field(default_factory=list)
    _meetings: dict[_Key, threading.RLock] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def meeting(self, name: str, device: torch.device) -> threading.RLock:
        """Held by the thread that waits for the ranks of a group: one thread does at a time."""
        with self._lock:
            return self._meetings.setdefault((name, device), threading.RLock())

    @property
    def held_bytes(self) -> int:
        """Symmetric memory that this process holds, over all groups."""
        with self._lock:
            return sum(one.held_bytes for one in (*self.groups.values(), *self.ended))

    def device(self, device: torch.device) -> Device:
        """Raises: DriverError."""
        with self._lock:
            found = self.devices.get(device)
            if found is None:
                streams, num_sms = self.platform.streams(device), self.platform.num_sms(device)
                found = self.devices[device] = Device(
                    device=device,
                    num_sms=num_sms,
                    streams=streams,
                    chain=LaunchChain(streams),
                    host=self.platform.host(device),
                    recorder=Recorder(device=device, num_blocks=num_sms) if self.is_traced else None,
                )
            return found

    def group(self, name: str, device: torch.device) -> Group:
        """The group's state; a new one where the name belongs to another group than before. Collective when new: the
        caller holds the group's `meeting`.

        Raises: PeerTimeoutError for ranks that do not come.
        """
        found = self.groups.get((name, device))
        if found is None or not _lives(name, found):
            self._end_groups()  # waits for the device: only where ranks meet anyway
            found = self._meet(name, find(name), device)
            with self._lock:
                self.groups[name, device] = found
        return found

    def _meet(self, name: str, process_group: ProcessGroup, device: torch.device) -> Group:
        exchange = Exchange(process_group, f"launch/{device.type}", settings().timeout_s)
        survey = self.platform.survey(exchange, device)
        workspace = self._workspace(name, exchange, survey, device)
        if workspace.network is not None:
            self._refuse_capture("the nodes of the group are not joined yet")
        obstacle = survey.obstacle or connect_nodes(workspace)
        if obstacle:
            _LOG.warning("operators of group %s run unfused: %s", name, obstacle)
        # the ranks of a fake group never come, and where nothing is launched nothing is left to others
        nothing = Reserve(has_traffic=True, given=False, newest=newest_group())
        return Group(
            obstacle=obstacle,
            reserve=nothing if obstacle else of_group(exchange),
            workspace=workspace,
            area=GatherArea(
                exchange=exchange, backing=workspace.backing, chain=workspace.chain, cap_bytes=workspace.cap_bytes
            ),
        )

    def _workspace(self, name: str, exchange: Exchange, survey: Survey, device: torch.device) -> GroupWorkspace:
        network, backing = None, None
        if survey.placement.num_nodes > 1 and not survey.obstacle:
            network, backing = self.platform.network(exchange, device, survey)
        return GroupWorkspace(
            exchange=exchange,
            backing=BehindOthers(backing or self.platform.backing(device, name), self.let_held_launches_end),
            board=self._fault_board(device),
            chain=self.device(device).chain,
            cap_bytes=settings().arena_bytes,
            network=network,
        )

    def _end_groups(self) -> None:
        """Close those whose process group is gone: no collective, since their other ranks may not come any more."""
        with self._lock:
            gone = [key for key, one in self.groups.items() if not _lives(key[0], one)]
            closing, self.ended = self.ended + [self.groups.pop(key) for key in gone], []
        try:
            for one in closing:
                self.on_end(one)
            if not self.platform.is_capturing():  # which can't wait for the device
                for one in closing:
                    one.workspace.close()
                    one.area.close()
        finally:  # an error, or a user who stops the wait: the rest is closed at the next look-up
            with self._lock:
                self.ended += [one for one in closing if one.held_bytes]

    def _fault_board(self, device: torch.device) -> FaultBoard:
        with self._lock:
            if self.board is None:
                self.board = FaultBoard(self.platform.fault_memory(device))
            return self.board

    def kernel(self, config: KernelConfig, device: Device) -> LoadedKernel:
        """Loaded. Raises: WorkspaceError while a graph is captured; CompileError; DriverError."""
        with self._lock:
            found = device.kernels.get(config)
            if found is None:
                self._refuse_capture(f"{config.name} is not loaded yet")
                found = device.kernels[config] = self.platform.load(config, device.device)
            return found

    def let_held_launches_end(self) -> None:
        """Before anything is loaded or symmetric memory is made, whatever group it is for: replays may wait for proxies
        that the driver would hold up; see `Repeatable._let_end`.
        """
        with self._lock:
            held = [one.workspace for one in (*self.groups.values(), *self.ended) if one.workspace.is_held]
        if held and not self.platform.is_capturing():
            for one in held:
                one.backing.settle()

    def engine(self, device: Device) -> EngineDevice:
        """The copy engine. Raises: as `kernel`."""
        with self._lock:
            if device.engine is None:
                self._refuse_capture("the copy engine is not set up")
                device.engine = self.platform.engine(device.device, device.streams)
            return device.engine

    def mover(self, device: Device) -> MoverDevice:
        """The kernel that moves shards over nodes. Raises: as `kernel`."""
        with self._lock:
            if device.mover is None:
                self._refuse_capture("the kernel that moves shards is not loaded")
                device.mover = self.platform.mover(device.device, device.streams)
            return device.mover

    def _refuse_capture(self, what: str) -> None:
        if self.platform.is_capturing():
            raise WorkspaceError(f"a CUDA graph is being captured and {what}; {WARM_UP_FIRST}")


def _lives(name: str, group: Group) -> bool:
    """Is the name still that of the same process group?"""
    try:
        return group.workspace.exchange.group() is find(name)
    except (RuntimeError, KeyError, ValueError):  # no group has the name
        return False
