"""All all-gather calls of one signature: what is decided once, and what each of them then does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mkcompile.ops.groups import find
from mkcompile.runtime import form as forms
from mkcompile.runtime.gather_engine import EngineDevice, EnginePlaces, PreparedTransfers, transfers
from mkcompile.runtime.gather_form import GatherForm, as_shard
from mkcompile.runtime.gather_launch import GatherLaunch, PreparedGather, argument_words
from mkcompile.runtime.gather_schedule import GatherChoice
from mkcompile.runtime.host import contiguous_strides
from mkcompile.runtime.kernel import LoadedKernel
from mkcompile.runtime.operation import GROUP, Device, Group
from mkcompile.runtime.symmetric import SymmetricBuffer
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


class Prepared(Protocol):
    """One call's work for one set of addresses."""

    def run(self, tensors: GatherTensors, stream: int, captured: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class Pushed:
    """One kernel."""

    kernel: PreparedGather

    def run(self, tensors: GatherTensors, stream: int, captured: bool) -> None:
        """Raises: DriverError."""
        self.kernel.run(stream, captured)


@dataclass(frozen=True, slots=True)
class CopiedByEngine:
    """Transfers beside one kernel."""

    kernel: PreparedGather
    sent: PreparedTransfers

    def run(self, tensors: GatherTensors, stream: int, captured: bool) -> None:
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

    def run(self, tensors: GatherTensors, stream: int, captured: bool) -> None:
        """On torch's current stream, which is `stream`. Raises: DriverError."""
        size, group_rows = self.form.size, self.choice.schedule.group_rows
        self.sent.open(stream)
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
    def _multiply(tensors: GatherTensors, rows: Tensor, first: int) -> None:
        for w, bias, out in zip(tensors.w, tensors.bias, tensors.outs, strict=True):
            target = out[first : first + rows.shape[0]]
            if bias is None:
                torch.mm(rows, w, out=target)
            else:
                torch.addmm(bias, rows, w, out=target)


@dataclass(slots=True, kw_only=True)
class GatherOperation:
    """All calls of one signature. `launches` is what was prepared, by the addresses of operands and results."""

    form: GatherForm
    choice: GatherChoice
    kernel: LoadedKernel | None
    engine: EngineDevice | None
    device: Device
    group: Group
    process_group: Callable[[], ProcessGroup | None]
    workspace: Workspace | None = None
    area: SymmetricBuffer | None = None
    launches: dict[tuple[int, ...], Prepared] = field(default_factory=dict)
    model: PreparedGather | None = None

    def again(
        self, x: Tensor, w: Sequence[Tensor], bias: Sequence[Tensor | None], *options: Any
    ) -> list[Tensor] | None:
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

    def run(self, x: Tensor, w: Sequence[Tensor], bias: Sequence[Tensor | None]) -> list[Tensor]:
        """On the current stream of the operands' device.

        Raises: WorkspaceError, PeerTimeoutError, UnsupportedDeviceError, DriverError.
        """
        device, host = self.device, self.device.host
        if host.current_device() != host.device_idx:
            with torch.cuda.device(device.device):
                return self.run(x, w, bias)
        outs = [host.empty(shape, contiguous_strides(shape), x.dtype) for shape in self.form.out_shapes]
        tensors = self._tensors(x, w, bias, outs)
        addresses = _addresses(tensors)
        with device.lock:
            stream = host.current_stream()
            capture = device.chain.enter(stream)
            current = self.group.workspace.current
            stale = self.workspace is not current or current is None or current.slot.failed
            if stale or capture or (self.engine is not None and self.area is not self.group.area.current):
                self._bind(capture != 0)
            prepared = self.launches.get(addresses)
            if prepared is None:
                prepared = self._prepare(tensors, addresses)
            prepared.run(tensors, stream, capture != 0)
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

    @property
    def demand(self) -> Demand:
        """What a launch wants of the workspace."""
        schedule, size = self.choice.schedule, self.form.size
        staged = schedule.arena_bytes(size) if schedule.pushes else 0
        return Demand(tiles=schedule.flags(size), region_bytes=staged)

    def _bind(self, capturing: bool) -> None:
        workspace = self.group.workspace.require(self.demand, capturing)
        area = None
        if self.engine is not None:
            area = self.group.area.require(self.choice.schedule.arena_bytes(self.form.size), capturing)
        if workspace is not self.workspace or area is not self.area:
            self.workspace, self.area = workspace, area
            self.launches.clear()
            self.model = None

    def _prepare(self, tensors: GatherTensors, addresses: tuple[int, ...]) -> Prepared:
        if len(self.launches) >= _MAX_LAUNCHES:
            self.launches.clear()
        prepared = self.launches[addresses] = self._prepared(tensors)
        return prepared

    def _prepared(self, tensors: GatherTensors) -> Prepared:
        launch = self._launch(tensors)
        if self.kernel is None:
            packed, gather, identity = argument_words(launch, "library")
            self.group.workspace.board.describe(identity)
            return self._by_library(PreparedTransfers(self._engine, (packed, gather), self._copies(launch)))
        kernel = PreparedGather(self.kernel, launch) if self.model is None else self._moved(self.model, tensors)
        if self.model is None:
            self.model = kernel
            self.group.workspace.board.describe(kernel.identity)
        if self.engine is None:
            return Pushed(kernel)
        return CopiedByEngine(kernel, PreparedTransfers(self._engine, kernel.arguments, self._copies(launch)))

    @property
    def _engine(self) -> EngineDevice:
        assert self.engine is not None
        return self.engine

    def _by_library(self, sent: PreparedTransfers) -> ByLibrary:
        assert self.area is not None
        memory: Tensor = self.area.keep[1]
        dtype = torch.bfloat16 if self.form.config.dtype == "bfloat16" else torch.float16
        rank = self.group.workspace.exchange.rank
        return ByLibrary(sent=sent, landing=memory.view(dtype), rank=rank, choice=self.choice, form=self.form)

    def _moved(self, model: PreparedGather, tensors: GatherTensors) -> PreparedGather:
        return model.moved(
            tensors.shard.data_ptr(),
            tuple(one.data_ptr() for one in tensors.weights),
            tuple(one.data_ptr() for one in tensors.outs),
            tuple(0 if one is None else one.data_ptr() for one in tensors.bias),
            0 if tensors.gathered is None else tensors.gathered.data_ptr(),
        )

    def _copies(self, launch: GatherLaunch) -> list[Any]:
        assert self.area is not None
        places = EnginePlaces(
            rank=launch.peers.rank, layout=launch.peers.layout, workspaces=launch.peers.workspaces,
            areas=self.area.addresses,
        )  # fmt: skip
        return list(transfers(launch.shard.pointer, launch.size, launch.schedule, places))

    def _launch(self, tensors: GatherTensors) -> GatherLaunch:
        assert self.workspace is not None
        peers = self.group.workspace.peers(self.workspace)
        return GatherLaunch(
            shard=Matrix.of(tensors.shard),
            weights=tuple(Matrix.of(one) for one in tensors.weights) if self.kernel else (),
            outs=tuple(Matrix.of(one) for one in tensors.outs),
            biases=tuple(0 if one is None else one.data_ptr() for one in tensors.bias),
            size=self.form.size,
            schedule=self.choice.schedule,
            peers=peers,
            result=0 if tensors.gathered is None else tensors.gathered.data_ptr(),
            landing=0 if self.area is None else self.area.addresses[peers.rank],
            trace=self.device.recorder,
        )


def _addresses(tensors: GatherTensors) -> tuple[int, ...]:
    return (
        tensors.shard.data_ptr(),
        *(one.data_ptr() for one in tensors.weights),
        *(0 if one is None else one.data_ptr() for one in tensors.bias),
        *(one.data_ptr() for one in tensors.outs),
        0 if tensors.gathered is None else tensors.gathered.data_ptr(),
    )
