"""All all-gather calls of one signature: what is decided once, and what each of them then does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Protocol

import torch
from torch import Tensor

from mkcompile.runtime import form as forms
from mkcompile.runtime.abi import KernelArguments
from mkcompile.runtime.external import Blueprint
from mkcompile.runtime.gather_abi import BLOCKS_PULL, GatherArguments
from mkcompile.runtime.gather_engine import EngineDevice, EnginePlaces, PreparedTransfers, transfers
from mkcompile.runtime.gather_form import GatherForm, as_shard
from mkcompile.runtime.gather_launch import (
    GatherLaunch,
    GatherSize,
    PreparedGather,
    argument_words,
)
from mkcompile.runtime.gather_schedule import GatherChoice, resident_grid
from mkcompile.runtime.host import contiguous_strides
from mkcompile.runtime.identity import LaunchIdentity
from mkcompile.runtime.kernel import LoadedKernel, PeerTable
from mkcompile.runtime.network_gather import MoverDevice, PreparedNetworkGather, mover_grid, region_demand
from mkcompile.runtime.operation import Group, Repeatable
from mkcompile.runtime.recorder import Recorder
from mkcompile.runtime.reserve import GROUPS, newest_group
from mkcompile.runtime.tensor_map import Matrix
from mkcompile.runtime.workspace import Demand, Workspace

_MAX_LAUNCHES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherTensors:
    """Operands and results of one call, the shard as a matrix; `weights` as the kernel reads them, `w` as given."""

    shard: Tensor
    w: Sequence[Tensor]
    weights: Sequence[Tensor]
    bias: Sequence[Tensor | None]
    outs: Sequence[Tensor]
    gathered: Tensor | None

    @property
    def results(self) -> tuple[Tensor, ...]:
        """All of them, in order."""
        return tuple(self.outs) if self.gathered is None else (*self.outs, self.gathered)


class Prepared(Protocol):
    """One call's work for one set of addresses; only the library is given the tensors again."""

    @property
    def identity(self) -> LaunchIdentity: ...
    def run(self, tensors: GatherTensors | None, stream: int, captured: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class ByKernel:
    """One kernel; over nodes the one that moves shards goes with it."""

    kernel: PreparedGather | PreparedNetworkGather

    @property
    def identity(self) -> LaunchIdentity:
        """What the launch is."""
        return self.kernel.identity

    def run(self, tensors: GatherTensors | None, stream: int, captured: bool) -> None:
        """Raises: DriverError."""
        self.kernel.run(stream, captured)


@dataclass(frozen=True, slots=True)
class CopiedByEngine(ByKernel):
    """Transfers beside one kernel."""

    sent: PreparedTransfers

    def run(self, tensors: GatherTensors | None, stream: int, captured: bool) -> None:
        """Raises: DriverError."""
        self.sent.start(stream)
        self.kernel.run(stream, captured)
        self.sent.finish(stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class ByLibrary:
    """Transfers beside the library's products: of the own rows, then of each chunk that comes. Contiguous rows only.

    `landing`: the area of this rank, as elements of the shard's dtype.
    """

    sent: PreparedTransfers
    landing: Tensor
    rank: int
    choice: GatherChoice
    form: GatherForm
    identity: LaunchIdentity

    def run(self, tensors: GatherTensors | None, stream: int, captured: bool) -> None:
        """On torch's current stream, which is `stream`. Raises: DriverError."""
        assert tensors is not None
        size, group_rows = self.form.size, self.choice.schedule.group_rows
        self.sent.open(stream, captured)
        self.sent.start(stream)
        self._multiply(tensors, tensors.shard, self.rank * size.shard_rows)
        groups = ceil(size.shard_rows / group_rows)
        for step in range(1, size.world):
            source = (self.rank + step) % size.world
            for group in range(groups):
                first = group * group_rows
                rows = min(group_rows, size.shard_rows - first)
                start = ((step - 1) * size.shard_rows + first) * size.k
                came = self.landing[start : start + rows * size.k].view(rows, size.k)
                self.sent.await_rows(stream, source, group, last=step == size.world - 1 and group == groups - 1)
                self._multiply(tensors, came, source * size.shard_rows + first)
        self.sent.finish(stream)

    @staticmethod
    @torch.no_grad()
    def _multiply(tensors: GatherTensors, rows: Tensor, first: int) -> None:
        """Operators called by hand are not below autograd, which takes no `out` beside a parameter."""
        for w, bias, out in zip(tensors.w, tensors.bias, tensors.outs, strict=True):
            target = out[first : first + rows.shape[0]]
            if bias is None:
                torch.mm(rows, w, out=target)
            else:
                torch.addmm(bias, rows, w, out=target)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSide:
    """What a rank's copy engine works with; `memory` is its area, where the others' write, `places` knows all areas."""

    device: EngineDevice
    places: EnginePlaces
    memory: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherSite:
    """All that the calls of one signature share on one workspace. No `kernel`: the library multiplies. `mover`: over
    several nodes.
    """

    form: GatherForm
    choice: GatherChoice
    kernel: LoadedKernel | None
    peers: PeerTable
    engine: EngineSide | None = None
    mover: MoverDevice | None = None
    trace: Recorder | None = None

    def prepare(self, tensors: GatherTensors, model: PreparedGather | None = None) -> Prepared:
        """For these addresses; `model` is of other ones. Raises: OperatorInputError, WorkspaceError."""
        launch = self._launch(tensors)
        if self.kernel is None:
            return self._by_library(launch)
        if self.mover is not None:
            grid = mover_grid(self.peers.layout.world, self.form.returned)
            return ByKernel(PreparedNetworkGather(self.kernel, self.mover, launch, grid))
        kernel = PreparedGather(self.kernel, launch) if model is None else _moved(model, tensors)
        if self.engine is None:
            return ByKernel(kernel)
        return CopiedByEngine(kernel, self._sent(self.engine, kernel.arguments, launch))

    @staticmethod
    def _sent(
        engine: EngineSide, arguments: tuple[KernelArguments, GatherArguments], launch: GatherLaunch
    ) -> PreparedTransfers:
        copies = transfers(launch.shard.pointer, launch.size, launch.schedule, engine.places)
        return PreparedTransfers(engine.device, arguments, copies)

    def _by_library(self, launch: GatherLaunch) -> ByLibrary:
        assert self.engine is not None
        packed, gather, identity = argument_words(launch, "library")
        dtype = torch.bfloat16 if self.form.config.dtype == "bfloat16" else torch.float16
        return ByLibrary(
            sent=self._sent(self.engine, (packed, gather), launch), landing=self.engine.memory.view(dtype),
            rank=self.peers.rank, choice=self.choice, form=self.form, identity=identity,
        )  # fmt: skip

    def _launch(self, tensors: GatherTensors) -> GatherLaunch:
        return GatherLaunch(
            shard=Matrix.of(tensors.shard),
            weights=tuple(Matrix.of(one) for one in tensors.weights) if self.kernel else (),
            outs=tuple(Matrix.of(one) for one in tensors.outs),
            biases=tuple(0 if one is None else one.data_ptr() for one in tensors.bias),
            size=self.form.size,
            schedule=self.choice.schedule,
            peers=self.peers,
            result=0 if tensors.gathered is None else tensors.gathered.data_ptr(),
            landing=0 if self.engine is None else self.engine.places.areas[self.peers.rank],
            trace=self.trace,
        )


def _moved(model: PreparedGather, tensors: GatherTensors) -> PreparedGather:
    return model.moved(
        tensors.shard.data_ptr(),
        tuple(one.data_ptr() for one in tensors.weights),
        tuple(one.data_ptr() for one in tensors.outs),
        tuple(0 if one is None else one.data_ptr() for one in tensors.bias),
        0 if tensors.gathered is None else tensors.gathered.data_ptr(),
    )


@dataclass(slots=True, kw_only=True)
class GatherOperation(Repeatable[Tensor, Sequence[Tensor | None], list[Tensor]]):
    """All calls of one signature. `launches` is what was prepared, by the addresses of operands and results."""

    form: GatherForm
    choice: GatherChoice
    kernel: LoadedKernel | None
    engine: EngineDevice | None
    mover: MoverDevice | None = None
    areas: tuple[int, ...] = ()
    launches: dict[tuple[int, ...], Prepared] = field(default_factory=dict)
    site: GatherSite | None = None
    model: PreparedGather | None = None

    def run(self, x: Tensor, w: Sequence[Tensor], bias: Sequence[Tensor | None]) -> list[Tensor]:
        """On the current stream of the operands' device.

        Raises: WorkspaceError, PeerTimeoutError, UnsupportedDeviceError, DriverError.
        """
        device, host = self.device, self.device.host
        if host.current_device() != host.device_idx:
            with torch.cuda.device(device.device):
                return self.run(x, w, bias)
        if self.newest_group() is not next(reversed(GROUPS), None):
            with device.lock:
                self._notice_groups()
        outs = [host.empty(shape, contiguous_strides(shape), x.dtype) for shape in self.form.out_shapes]
        addresses = _addresses(x, w, bias, outs)
        with device.lock:
            stream = host.current_stream()
            capture = device.chain.enter(stream)
            current = self.group.workspace.current
            stale = self.workspace is not current or current is None or current.slot.failed
            if stale or capture or (self.engine is not None and self.areas is not self.group.area.addresses):
                self._bind(stream, capture != 0)
            prepared = self.launches.get(addresses)
            tensors = None
            if prepared is None or self.kernel is None:
                tensors = self._tensors(x, w, bias, outs)
            if prepared is None:
                assert tensors is not None
                prepared = self._prepare(tensors, addresses)
            prepared.run(tensors, stream, capture != 0)
            if self.is_held:
                self._let_end(capture != 0)
            device.chain.leave(stream, capture)
        return outs

    def _tensors(
        self, x: Tensor, w: Sequence[Tensor], bias: Sequence[Tensor | None], outs: list[Tensor]
    ) -> GatherTensors:
        products = len(self.form.size.n)
        if self.kernel is None:
            weights: Sequence[Tensor] = w
        else:
            weights = [forms.as_weight(w_KN, self.form.config.weight_layout) for w_KN in w]
        return GatherTensors(
            shard=as_shard(x), w=w, weights=weights, outs=outs[:products],
            bias=[None if one is None else forms.as_vector(one) for one in bias],
            gathered=outs[products] if self.form.returned else None,
        )  # fmt: skip

    def _notice_groups(self) -> None:
        """There are other groups than before, whose collectives may need room. Grids may differ by rank, but for those
        whose blocks fetch what the same blocks of a peer have laid ready: they keep what all ranks agreed on.
        """
        self.newest_group = newest_group()
        group, schedule = self.process_group(), self.choice.schedule
        if group is None or self.kernel is None or schedule.mover == BLOCKS_PULL:
            return
        max_grid = self.device.num_sms - self.group.reserve.sms_now(self.plan_key, group)
        if self.mover is not None:
            max_grid -= mover_grid(self.group.workspace.node_world, self.form.returned).blocks
        config = self.choice.config
        grid = max(1, min(schedule.grid, resident_grid(config, max_grid)) // config.split) * config.split
        if grid != schedule.grid:
            self.choice = replace(self.choice, schedule=replace(schedule, grid=grid))
            self.workspace = None  # what is prepared holds the old grid

    def _bind(self, stream: int, capturing: bool) -> None:
        demand, workspace = _demand(self.choice, self.form.size, self.group), None
        areas: tuple[int, ...] = ()
        while workspace is None or workspace is not self.group.workspace.current:  # ranks may be waited for in between
            workspace = self.group.workspace.require(demand, stream, capturing)
            if self.engine is not None:
                num_bytes = self.choice.schedule.arena_bytes(self.form.size)
                areas = self.group.area.require(num_bytes, stream, capturing, workspace.slot)
        if workspace is not self.workspace or areas is not self.areas:
            self.workspace, self.areas, self.is_held = workspace, areas, workspace.is_held
            self.launches.clear()
            self.model = None
            self.site = self._site(workspace, areas)

    def _site(self, workspace: Workspace, areas: tuple[int, ...]) -> GatherSite:
        peers, side = self.group.workspace.peers(workspace), None
        if self.engine is not None:
            places = EnginePlaces(rank=peers.rank, layout=peers.layout, workspaces=peers.workspaces, areas=areas)
            # not the area's own tensor: calls of this signature may never come again, and the area is to go then
            elements = self.choice.schedule.arena_bytes(self.form.size) // torch.bfloat16.itemsize
            landing = Blueprint((elements,), (1,), torch.bfloat16, self.device.device)
            side = EngineSide(device=self.engine, places=places, memory=landing.at(areas[peers.rank]))
        return GatherSite(
            form=self.form, choice=self.choice, kernel=self.kernel, peers=peers, engine=side,
            mover=self.mover, trace=self.device.recorder,
        )  # fmt: skip

    def _prepare(self, tensors: GatherTensors, addresses: tuple[int, ...]) -> Prepared:
        """Kept, and the model of others, where all operands are read where they were given."""
        assert self.site is not None
        in_place = _addresses(tensors.shard, tensors.weights, tensors.bias, tensors.results) == addresses
        prepared = self.site.prepare(tensors, self.model if in_place else None)
        if self.model is None:
            self.group.workspace.board.describe(prepared.identity)
        if in_place:
            if len(self.launches) >= _MAX_LAUNCHES:
                self.launches.clear()
            self.launches[addresses] = prepared
            if isinstance(prepared, ByKernel) and isinstance(prepared.kernel, PreparedGather):
                self.model = self.model or prepared.kernel
        return prepared


def _addresses(
    x: Tensor, w: Sequence[Tensor], bias: Sequence[Tensor | None], results: Sequence[Tensor]
) -> tuple[int, ...]:
    present = (x, *w, *(one for one in bias if one is not None), *results)
    return tuple(one.data_ptr() for one in present)


def _demand(choice: GatherChoice, size: GatherSize, group: Group) -> Demand:
    """What a launch wants of the workspace."""
    schedule = choice.schedule
    if choice.variant == "network":
        tiles, region_bytes = region_demand(schedule, size, group.workspace.node_world)
        return Demand(tiles=tiles, region_bytes=region_bytes)
    staged = 0 if schedule.by_engine else schedule.arena_bytes(size)
    return Demand(tiles=schedule.flags(size), region_bytes=staged)


def room_missing(choice: GatherChoice, size: GatherSize, group: Group) -> str:
    """Why the rows that come have no place under the cap, empty if they have: the same on every rank."""
    workspaces, needed_bytes = group.workspace, choice.schedule.arena_bytes(size)
    room_bytes = group.area.cap_bytes
    if choice.variant == "network" or not choice.schedule.by_engine:  # over nodes rows come into the workspace
        demand = _demand(choice, size, group)
        needed_bytes, room_bytes = max(needed_bytes, demand.region_bytes), workspaces.layout(demand).region_bytes
    if needed_bytes <= room_bytes:
        return ""
    return f"{needed_bytes} bytes of gathered rows, there is room for {room_bytes}; raise MKCOMPILE_ARENA_BYTES"
