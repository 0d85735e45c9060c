"""All-gather calls of ranks without processes: operands, launches of every variant, and what the results must be.

Shapes: see mkcompile.runtime.gather_launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mkcompile.runtime.gather_engine import EngineDevice, EnginePlaces
from mkcompile.runtime.gather_form import GatherForm
from mkcompile.runtime.gather_launch import GatherSize
from mkcompile.runtime.gather_operation import EngineSide, GatherSite, GatherTensors, Prepared
from mkcompile.runtime.gather_schedule import GatherChoice
from mkcompile.runtime.kernel import LoadedKernel, compile_kernel, load_kernel
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.streams import DriverStreams

from .ranks import RankGroup, RankInput, nan_outputs, random_input
from .truth import assert_bitwise, assert_close, summed


@dataclass(slots=True)
class Engines:
    """The copy engines' side of a group: for every rank a stream with its kernels, and an area full of NaN."""

    group: RankGroup
    area_bytes: int
    devices: list[EngineDevice] = field(init=False, default_factory=list)
    areas: list[Tensor] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        for device in self.group.devices:
            with torch.cuda.device(device):
                self.devices.append(EngineDevice.on(device, DriverStreams()))
            self.areas.append(torch.full((self.area_bytes,), 0xFF, dtype=torch.uint8, device=f"cuda:{device}"))
        torch.cuda.synchronize()

    def side(self, rank: int) -> EngineSide:
        """As one rank sees them."""
        peers = self.group.peers(rank)
        areas = tuple(area.data_ptr() for area in self.areas)
        places = EnginePlaces(rank=rank, layout=peers.layout, workspaces=peers.workspaces, areas=areas)
        return EngineSide(device=self.devices[rank], places=places, memory=self.areas[rank])


@dataclass(slots=True, kw_only=True)
class Call:
    """One call on all ranks: operands, and NaN where results will be."""

    size: GatherSize
    config: KernelConfig
    tensors: list[GatherTensors]
    prepared: list[Prepared]

    @staticmethod
    def make(
        group: RankGroup, choice: GatherChoice, size: GatherSize, *, seed: int = 0, integers: bool = False,
        returned: bool = False, engines: Engines | None = None, kernels: Sequence[LoadedKernel] | None = None,
    ) -> Call:  # fmt: skip
        """Different numbers on every rank and for every seed."""
        tensors = [draw(group, rank, choice.config, size, 10 * seed, integers, returned) for rank in range(group.world)]
        prepared = [
            prepare_rank(group, rank, choice, size, one, engines, kernels[rank] if kernels else None)
            for rank, one in enumerate(tensors)
        ]
        return Call(size=size, config=choice.config, tensors=tensors, prepared=prepared)

    def run(self, group: RankGroup, captured: bool = False, ranks: Sequence[int] | None = None) -> None:
        """Enqueue on the given ranks (default: all), each on its stream."""
        for rank in ranks if ranks is not None else range(group.world):
            with torch.cuda.device(group.devices[rank]), torch.cuda.stream(group.streams[rank]):
                stream = torch.cuda.current_stream().cuda_stream
                self.prepared[rank].run(self.tensors[rank], stream, captured)

    def whole(self, device: str) -> Tensor:
        """The gathered matrix."""
        size, parts = self.size, [one.shard.to(device) for one in self.tensors]
        if size.columns:
            return torch.cat(parts, 1)
        stacked = torch.stack([part.view(size.segments, size.segment_rows, size.k) for part in parts], 1)
        return stacked.reshape(size.rows, size.k)

    def check(self, exact: bool, what: str) -> None:
        """Close per tile, or exact; the gathered tensor bitwise."""
        home = str(self.tensors[0].shard.device)
        whole = self.whole(home)
        for rank, one in enumerate(self.tensors):
            for i, out in enumerate(one.outs):
                given = RankInput(x=whole, w=one.weights[i], bias=one.bias[i])
                truth, baseline = summed([given], self.config, home)
                text = f"{what} {self.config.name} {self.size} rank {rank} product {i}"
                if exact:
                    assert_bitwise(out.to(home), truth, text)
                else:
                    assert_close(out.to(home), truth, baseline, text)
            if one.gathered is not None:
                got = one.gathered.to(home)
                assert torch.equal(got.view(torch.int16), whole.view(torch.int16)), f"{what}: gathered of rank {rank}"


def run_back_to_back(group: RankGroup, calls: Sequence[Call], late: Sequence[int], what: str) -> None:
    """One epoch a call, `late` ranks behind the others; all checked afterwards. Odd epochs have integers: exact."""
    group.synchronize()
    for epoch, call in enumerate(calls):
        for rank in late:
            group.delay(rank, 2_000_000 * (1 + epoch % 2))
        call.run(group)
    group.synchronize()
    group.check()
    for epoch, call in enumerate(calls):
        call.check(epoch % 2 == 1, f"{what} W={group.world} epoch {epoch}")


def draw(
    group: RankGroup, rank: int, config: KernelConfig, size: GatherSize, seed: int, integers: bool, returned: bool
) -> GatherTensors:
    """One rank's operands, and NaN where results will be."""
    device = group.devices[rank]
    inputs = [random_input(rank, device, 1, n, size.inner, config, seed + i, integers) for i, n in enumerate(size.n)]
    shard = random_input(rank, device, size.shard_rows, 8, size.k, config, seed + 9, integers).x
    weights = [one.w for one in inputs]
    return GatherTensors(
        shard=shard,
        weights=weights,
        w=[one.t() for one in weights] if config.weight_layout == "nk" else weights,
        bias=[one.bias if i % 2 == 0 else None for i, one in enumerate(inputs)],
        outs=[nan_outputs(group, size.rows, n, config)[rank] for n in size.n],
        gathered=nan_outputs(group, size.rows, size.inner, config)[rank] if returned else None,
    )


def prepare_rank(
    group: RankGroup, rank: int, choice: GatherChoice, size: GatherSize, tensors: GatherTensors,
    engines: Engines | None, kernel: LoadedKernel | None = None,
) -> Prepared:  # fmt: skip
    """One rank's work; `engines` for the variants that use the copy engine."""
    assert engines is None or choice.schedule.arena_bytes(size) <= engines.area_bytes
    if choice.variant != "library":
        kernel = kernel or load_kernel(compile_kernel(choice.config), group.devices[rank])
    else:
        _load_library(choice, size, tensors, group.streams[rank])
    site = GatherSite(
        form=GatherForm(config=choice.config, size=size, gathered_shape=()), choice=choice, kernel=kernel,
        peers=group.peers(rank), engine=engines.side(rank) if engines else None,
    )  # fmt: skip
    return site.prepare(tensors)


def _load_library(choice: GatherChoice, size: GatherSize, tensors: GatherTensors, stream: torch.cuda.Stream) -> None:
    """Have the library load its kernels: loading may wait for kernels of this rank, which wait for another rank of the
    same process.
    """
    with torch.cuda.device(tensors.shard.device), torch.cuda.stream(stream):
        for rows in {size.shard_rows, choice.schedule.group_rows, size.shard_rows % choice.schedule.group_rows}:
            for w, bias in zip(tensors.w, tensors.bias, strict=True):
                some = tensors.shard[: min(rows, size.shard_rows)]
                torch.mm(some, w) if bias is None else torch.addmm(bias, some, w)
        torch.cuda.synchronize()
