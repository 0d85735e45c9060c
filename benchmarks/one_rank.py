"""`python -m benchmarks.one_rank`: what kernels for many rows cost one GPU where nobody is waited for, of some trees.

    python -m benchmarks.one_rank --compile FOLDER                        in each checkout; needs no GPU
    python -m benchmarks.one_rank --kernels old=FOLDER new=FOLDER --out FILE

One rank of two whose peer's workspace is its own, with flags that say that the peer is ahead. So a tile that is pushed
to the peer is what arrives as the peer's partial, and a reduce-scatter returns the sum of the halves of one product:
that is checked, as are equal bits of all trees. Rounds of cuBLAS and all trees, sustained; one kernel twice differs by
0.2 %. One line of the device sources is changed: a launch knows its peer by what it launches, in whichever epoch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from mkcompile.runtime import nvrtc, sources
from mkcompile.runtime.fault_word import FaultWord
from mkcompile.runtime.kernel import (
    OPTIONS,
    CompiledKernel,
    LaunchArguments,
    PeerTable,
    PreparedLaunch,
    load_kernel,
    translation_unit,
)
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.tactics import Tactic
from mkcompile.runtime.tensor_map import Matrix
from mkcompile.runtime.tile_schedule import LaunchSize, choose_schedule, choose_tile
from mkcompile.runtime.workspace_layout import WorkspaceLayout

from .measure import timed_ms
from .planned import planned_tactic
from .rounds import order_of_round
from .shapes import Shape

SHAPES = tuple(
    Shape(*sizes)
    for sizes in (
        (2048, 8192, 1024), (8192, 8192, 1024), (8192, 8192, 2048), (2048, 8192, 3584), (4096, 8192, 3584),
        (8192, 8192, 3584), (4096, 4096, 7168), (8192, 8192, 14336),
    )
)  # fmt: skip
OPERATORS = (
    KernelConfig(),
    KernelConfig(operator="gemm_reduce_scatter"),
    KernelConfig(operator="gemm_all_reduce", broadcast="direct"),
    KernelConfig(operator="gemm_all_reduce", broadcast="staged"),
)
_EXACT, _ANY_EPOCH = "(seen == entry(args, epoch))", "(seen >= entry(args, epoch))"
#: An epoch that no launch here reaches.
_AHEAD = 0x3FFFFFFF
_ARENA_BYTES = 768 << 20
_HEADER_BYTES, _ENTERED_BYTES, _FLAG_KINDS = 512, 256, 5
_TIMEOUT_S = 0.5
_TOLERANCE = 6e-3
_SPAN_US = 12000.0
_BACKLOG_CYCLES = 500_000
_USED_SMS, _ALL_SMS = 128, 132


class World:
    """The workspace of a rank that is its own peer."""

    def __init__(self) -> None:
        self.layout = WorkspaceLayout(world=2, total_bytes=_ARENA_BYTES)
        self._memory = torch.zeros(_ARENA_BYTES, dtype=torch.uint8, device="cuda")
        flags = self._memory[_HEADER_BYTES : _HEADER_BYTES + _FLAG_KINDS * 2 * self.layout.max_tiles * 4]
        flags.view(torch.int32).view(_FLAG_KINDS, 2, -1)[:, 1] = _AHEAD
        self._entered = self._memory[_ENTERED_BYTES:_HEADER_BYTES].view(torch.int64).view(2, -1)
        self.fault = FaultWord.allocate(0)

    def peers(self, outs: tuple[int, ...]) -> PeerTable:
        """Both ranks lie in one place."""
        return PeerTable(
            rank=0, workspaces=(self._memory.data_ptr(),) * 2, layout=self.layout, outs=outs,
            fault_address=self.fault.address, timeout_s=_TIMEOUT_S,
        )  # fmt: skip

    def expect(self, identity: int) -> None:
        """The peer has entered every launch of this identity; in stream order."""
        word = identity << 32 | _AHEAD
        self._entered[:, 1] = word - (1 << 64) if word >> 63 else word


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One launch and its result [M, N], of a reduce-scatter [M / 2, N]."""

    launch: PreparedLaunch
    out: torch.Tensor
    world: World

    def expect(self) -> None:
        self.world.expect(self.launch.identity.number)

    def __call__(self) -> None:
        self.launch.run(torch.cuda.current_stream().cuda_stream)


def tactic_of(base: KernelConfig, shape: Shape) -> Tactic:
    """As `benchmarks.run` launches it."""
    if base.reduces:
        return planned_tactic(
            base, LaunchSize(m=shape.m, n=shape.n, k=shape.k, world=2), _ALL_SMS - _USED_SMS, streams=False
        )
    size = LaunchSize(m=shape.m, n=shape.n, k=shape.k)
    config = choose_tile(base, size, _ALL_SMS)
    return config, choose_schedule(config, size, _ALL_SMS)


def headers() -> dict[str, str]:
    """The device sources, with the one line changed."""
    found = dict(sources.headers())
    assert found["device/sync.cuh"].count(_EXACT) == 1
    found["device/sync.cuh"] = found["device/sync.cuh"].replace(_EXACT, _ANY_EPOCH)
    return found


def compile_all(folder: Path) -> None:
    """This tree's kernels of all operators and shapes."""
    folder.mkdir(parents=True, exist_ok=True)
    for config in dict.fromkeys(tactic_of(base, shape)[0] for base in OPERATORS for shape in SHAPES):
        cubin = nvrtc.compile_cubin(config.name, translation_unit(config), headers(), OPTIONS)
        (folder / f"{config.name}.cubin").write_bytes(cubin.image)


def contender(base: KernelConfig, x: torch.Tensor, w: torch.Tensor, folder: Path, world: World) -> Contender:
    """One tree's launch, on x [M, K] and w [N, K]."""
    (m, k), n = x.shape, w.shape[0]
    config, schedule = tactic_of(base, Shape(m, n, k))
    cubin = nvrtc.Cubin(image=(folder / f"{config.name}.cubin").read_bytes(), log="")
    out = x.new_empty(m // 2 if base.operator == "gemm_reduce_scatter" else m, n)
    outs = (out.data_ptr(),) * 2 if base.broadcast == "direct" else ()
    arguments = LaunchArguments(
        terms=((Matrix.of(x), Matrix.of(w)),), out=Matrix.of(out), schedule=schedule,
        peers=world.peers(outs) if base.reduces else None,
    )  # fmt: skip
    kernel = load_kernel(CompiledKernel(config=config, cubin=cubin), torch.cuda.current_device())
    return Contender(launch=PreparedLaunch(kernel, arguments), out=out, world=world)


def check(base: KernelConfig, contenders: Mapping[str, Contender], x: torch.Tensor, w: torch.Tensor) -> None:
    """Sampled rows against fp64; of all-reduces, where the order of tiles decides what is added, only equal bits."""
    outs = []
    for one in contenders.values():
        one.expect()
        for _ in range(4):  # epochs of both parities: what lies in the slots now is of this launch
            one()
        one.out.fill_(float("nan"))
        one()
        torch.cuda.synchronize()
        one.world.fault.check()
        outs.append(one.out.view(torch.int16))
    same = all(torch.equal(outs[0], out) for out in outs[1:])
    if base.operator != "gemm_all_reduce":
        got = outs[0].view(torch.bfloat16)
        rows = torch.linspace(0, len(got) - 1, 48, device="cuda").round().long()
        halves = [rows] if len(got) == len(x) else [rows, rows + len(got)]
        truth = sum((x[half].double() @ w.double().t()).float() for half in halves)
        same = same and bool((got[rows].float() - truth).norm() < _TOLERANCE * torch.as_tensor(truth).norm())
    if not same:
        raise SystemExit(f"{base.name} at {tuple(x.shape)} x {tuple(w.shape)}: wrong result")


def samples_ms(
    contenders: Mapping[str, Contender], cublas: Callable[[], object], flop: int, rounds: int
) -> dict[str, list[float]]:
    """Milliseconds a call, one sample a round; the first round only warms."""
    everyone: dict[str, Callable[[], object]] = {"cublas": cublas, **contenders}
    num_calls = max(3, min(60, int(_SPAN_US / (flop / 650e6))))
    samples: dict[str, list[float]] = {name: [] for name in everyone}
    for index in range(rounds + 1):
        for name in order_of_round(everyone, index):
            if name in contenders:
                contenders[name].expect()
            ms = timed_ms(everyone[name], num_calls, _BACKLOG_CYCLES)
            samples[name] += [ms] if index else []
    return samples


def rows_of(
    base: KernelConfig, shape: Shape, folders: Mapping[str, Path], rounds: int, world: World
) -> Iterator[dict[str, object]]:
    """One row a contender: its time, and that over cuBLAS's and the first tree's of the same round (medians)."""
    generator = torch.Generator(device="cuda").manual_seed(shape.m + shape.n + shape.k)
    x, w = (
        torch.randn(rows, shape.k, device="cuda", generator=generator, dtype=torch.bfloat16)
        for rows in (shape.m, shape.n)
    )
    contenders = {name: contender(base, x, w, folder, world) for name, folder in folders.items()}
    check(base, contenders, x, w)
    whole = x.new_empty(shape.m, shape.n)
    samples = samples_ms(contenders, lambda: torch.mm(x, w.t(), out=whole), shape.flop, rounds)
    world.fault.check()
    for name, values in samples.items():
        over = {
            other: statistics.median(a / b for a, b in zip(values, samples[other], strict=True))
            for other in ("cublas", next(iter(folders)))
        }
        way = f"_{base.broadcast}" if base.broadcast != "none" else ""
        yield {
            "op": base.operator + way, "M": shape.m, "N": shape.n, "K": shape.k, "kernels": name,
            "us": round(statistics.median(values) * 1e3, 2), "rounds": rounds,
            **{f"over_{other}": round(ratio, 4) for other, ratio in over.items()},
        }  # fmt: skip


def main(arguments: list[str]) -> None:
    """Compile, or time what was compiled."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.one_rank", description=__doc__)
    parser.add_argument("--compile", type=Path, help="folder for this tree's kernels")
    parser.add_argument("--kernels", nargs="+", metavar="NAME=FOLDER", default=[], help="trees; the first is the base")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--out", type=Path, help="JSON lines are appended")
    options = parser.parse_args(arguments)
    if options.compile:
        compile_all(options.compile)
    folders = {name: Path(folder) for name, _, folder in (text.partition("=") for text in options.kernels)}
    if folders and options.out is None:
        parser.error("--kernels needs --out")
    if not folders:
        return
    world = World()
    for base, shape in product(OPERATORS, SHAPES):
        for row in rows_of(base, shape, folders, options.rounds, world):
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**row, "device": torch.cuda.get_device_name()}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
