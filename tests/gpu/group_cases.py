"""Groups that end while the process goes on, and groups that meet side by side: what must go goes, what is used stays.

MKCOMPILE_TIMEOUT_S is short. All numbers are exact.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mkcompile.config import settings
from mkcompile.errors import PeerTimeoutError
from mkcompile.runtime.workspace import Demand
from tests.gpu.gather_cases import Gather, only
from tests.gpu.pair import Pair, Product

#: `gather`: as the planner has it.
Kind = Literal["all_reduce", "copy_engine", "library", "gather"]
KINDS: tuple[Kind, ...] = ("all_reduce", "copy_engine", "library")
TURNS = 3
#: Workspaces and areas that two threads make for a group each; every one is larger than the one before.
GROWN_BYTES = (1 << 20, 96 << 20, 192 << 20)


@dataclass(slots=True, kw_only=True)
class Call:
    """One call on a group, with operands that stay where they are. `large` ones need new memory after small ones."""

    pair: Pair
    group: str
    kind: Kind
    large: bool
    problem: Product | Gather
    operands: tuple[Any, ...]

    @staticmethod
    def of(pair: Pair, group: str, kind: Kind, large: bool, seed: int = 1) -> Call:
        large = large and pair.on_gpu
        problem = _problem(kind, large, seed)
        return Call(pair=pair, group=group, kind=kind, large=large, problem=problem, operands=_operands(pair, problem))

    def way(self) -> Any:
        """How a gather's rows go."""
        return nullcontext() if self.kind in ("all_reduce", "gather") else only(self.pair, self.kind)

    def run(self) -> Tensor:
        """Within `way`."""
        if isinstance(self.problem, Product):
            return self.problem.call(self.pair, *self.operands, group=self.group)
        return self.problem.call(self.pair, *self.operands, group=self.group)[0]

    def check(self, out: Tensor) -> None:
        if isinstance(self.problem, Product):
            self.problem.check(self.pair, out)
        else:
            self.problem.check(self.pair, [out], *self.operands[1:], self.kind)

    def renew(self, seed: int) -> None:
        """Other numbers in the same place."""
        self.problem = _problem(self.kind, self.large, seed)
        for target, source in zip(_tensors(self.operands), _tensors(_operands(self.pair, self.problem)), strict=True):
            target.copy_(source)


def _problem(kind: Kind, large: bool, seed: int) -> Product | Gather:
    if kind == "all_reduce":
        rows, n, k = (8192, 4096, 1024) if large else (256, 520, 128)
        return Product(operator="gemm_all_reduce", rows=rows, n=n, k=k, integers=True, seed=seed)
    return Gather(shape=(4096, 4096) if large else (300, 264), n=(64,), integers=True, seed=seed)


def _operands(pair: Pair, problem: Product | Gather) -> tuple[Any, ...]:
    if isinstance(problem, Product):
        return problem.inputs(pair, pair.rank)
    return problem.shard(pair, pair.rank), *problem.operands(pair)


def _tensors(operands: tuple[Any, ...]) -> Iterator[Tensor]:
    for one in operands:
        if isinstance(one, Tensor):
            yield one
        elif one is not None:
            yield from _tensors(tuple(one))


@contextmanager
def _group(pair: Pair) -> Iterator[str]:
    """A group of both ranks until the end, at which both are idle."""
    group = dist.new_group([0, 1], device_id=pair.device) if pair.on_gpu else dist.new_group([0, 1])
    assert isinstance(group, ProcessGroup)
    yield group.group_name
    pair.meet()
    dist.destroy_process_group(group)


def ended_groups_give_back(pair: Pair) -> dict[str, Any]:
    """Groups come and go, each with a workspace and an area that grow: the process holds as much as with the first."""
    held_mib, free_mib = [], []
    for turn in range(TURNS):
        with _group(pair) as name:
            for large in (False, True):
                _run_twice([Call.of(pair, name, kind, large, seed=turn) for kind in KINDS])
                _note_memory(pair, held_mib, free_mib)
    pair.expect_launches("all_gather_gemm", at_least=8 * TURNS)
    pair.expect_launches("gemm_all_reduce", at_least=4 * TURNS)
    before, after = set(held_mib[::2]), set(held_mib[1::2])
    assert len(before) == len(after) == 1, held_mib
    assert not pair.on_gpu or max(before) < min(after), f"nothing grew: {held_mib}"
    return {"held_mib": held_mib, "free_mib": free_mib}


def _run_twice(calls: list[Call]) -> None:
    for one in calls:
        with one.way():
            outs = [one.run() for _ in range(2)]
        one.pair.synchronize()  # over nodes: what a check loads would hold up the proxies' copies
        for out in outs:
            one.check(out)


def _note_memory(pair: Pair, held_mib: list[int], free_mib: list[int]) -> None:
    held_mib.append(pair.launcher.held_bytes() >> 20)
    if pair.on_gpu:
        pair.meet()
        free_mib.append(torch.cuda.mem_get_info()[0] >> 20)


def graphs_outlive_their_groups(pair: Pair) -> dict[str, Any]:
    """Graphs of small calls stay right when the group's memory has grown, and all do when the group has ended."""
    captured: list[tuple[Call, torch.cuda.CUDAGraph, Tensor]] = []
    for turn in range(2):
        with _group(pair) as name:
            for large in (False, True):
                captured += [_captured(Call.of(pair, name, kind, large)) for kind in KINDS]
                _replay(captured, seed=10 * turn + large)
    with _group(pair) as name:
        one = Call.of(pair, name, "all_reduce", large=False)
        one.check(one.run())  # with which the two groups before are closed
        _replay(captured, seed=40)
        held_mib = pair.launcher.held_bytes() >> 20
        pair.meet()
    return {"graphs": len(captured), "held_mib": held_mib}


def _captured(one: Call) -> tuple[Call, torch.cuda.CUDAGraph, Tensor]:
    with one.way():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            one.run()
        torch.cuda.current_stream().wait_stream(stream)
        one.pair.meet()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # over nodes a proxy calls the driver, too
            out = one.run()
    one.pair.meet()
    return one, graph, out


def _replay(captured: list[tuple[Call, torch.cuda.CUDAGraph, Tensor]], seed: int) -> None:
    """All of them in turn, with numbers that none has seen."""
    for number, (one, graph, _) in enumerate(captured):
        one.renew(100 * seed + number + 2)
        graph.replay()
    for one, _, out in captured:
        one.pair.synchronize()  # see _run_twice
        one.check(out)


def threads_make_memory(pair: Pair) -> dict[str, Any]:
    """Two threads make and enlarge the memory of a group each, begun in another order on each rank."""
    with _group(pair) as first, _group(pair) as second:
        names = (first, second) if pair.rank == 0 else (second, first)
        begin = threading.Barrier(len(names))
        started = time.monotonic()
        with ThreadPoolExecutor(len(names)) as threads:
            for made in [threads.submit(_make_memory, pair, name, begin) for name in names]:
                made.result()
        seconds = time.monotonic() - started
        for name in (first, second):
            for kind in KINDS:
                one = Call.of(pair, name, kind, large=False)
                with one.way():
                    one.check(one.run())
    return {"seconds": round(seconds, 2), "handshakes": 2 * 2 * len(GROWN_BYTES)}


def _make_memory(pair: Pair, name: str, begin: threading.Barrier) -> None:
    resources, device = pair.launcher._resources, pair.launcher._resources.device(pair.device)
    with torch.cuda.device(pair.device):
        stream = torch.cuda.Stream().cuda_stream
        begin.wait()
        with resources.meeting(name, pair.device):
            group = resources.group(name, pair.device)
        assert not group.obstacle, group.obstacle
        for num_bytes in GROWN_BYTES:
            group.workspace.renew(Demand(tiles=1, region_bytes=num_bytes))
            with device.lock:
                device.chain.enter(stream)
                current = group.workspace.current
                assert current is not None
                group.area.require(num_bytes, stream, False, current.slot)


def report_of_an_ended_group(pair: Pair) -> dict[str, Any]:
    """Rank 0 launches alone on a group and ends it at once: what the launch reports meanwhile is raised, and names who
    did not come.
    """
    pair.meet()
    # of gloo: NCCL may wait for the device when a group ends
    lonely = dist.new_group([0, 1], backend="gloo")
    # by its member alone: torch makes a rank outside split NCCL's group, also for one of gloo, and that process ends
    alone = dist.new_group([0], backend="gloo", use_local_synchronization=True)
    assert isinstance(lonely, ProcessGroup)
    product = Product(operator="gemm_all_reduce", rows=512, n=1024, k=264, integers=True, seed=1)
    operands, name = product.inputs(pair, pair.rank), lonely.group_name
    product.check(pair, product.call(pair, *operands, group=name))
    pair.meet()
    board = pair.launcher._resources.board
    assert board is not None
    in_use, text, waited_s = len(board._slots), "", 0.0
    if pair.rank == 0:
        product.call(pair, *operands, group=name)
    dist.destroy_process_group(lonely)
    if pair.rank == 0:
        assert isinstance(alone, ProcessGroup)
        pair.launcher.check()  # the launch still waits
        started, resources = time.monotonic(), pair.launcher._resources
        with resources.meeting(alone.group_name, pair.device):
            resources.group(alone.group_name, pair.device)  # with which the other one is closed
        waited_s = time.monotonic() - started
        try:
            pair.launcher.check()
        except PeerTimeoutError as error:
            text = str(error)
            assert error.report.peer == 1, text
        assert text, "the report was lost"
        assert waited_s < settings().timeout_s + 3, f"{waited_s:.1f} s"
        assert len(board._slots) == in_use - 1, "the report's place is still taken"
        pair.launcher.check()  # once
    dist.barrier()
    product.check(pair, product.call(pair, *operands))
    return {"error": text, "waited_s": round(waited_s, 2)}


def memory_of_nodes(pair: Pair) -> dict[str, Any]:
    """Over nodes: a workspace that is replaced is unmapped by all ranks and then freed, unless a graph uses it."""
    kinds: tuple[Kind, ...] = ("all_reduce", "gather")
    held_mib, free_mib = list[int](), list[int]()
    pair.same_on_all_ranks(pair.draw(512, 1024, seed=1, rank=0), "before anything fused")  # NCCL connects
    pair.meet()
    for captures in (False, True):
        with _group(pair) as name:
            small = [Call.of(pair, name, kind, large=False) for kind in kinds]
            _run_twice(small)
            _note_memory(pair, held_mib, free_mib)
            captured = [_captured(small[0])] if captures else []
            _run_twice([Call.of(pair, name, kind, large=True) for kind in kinds])
            _run_twice(small)
            _note_memory(pair, held_mib, free_mib)
            _replay(captured, seed=50)
    pair.expect_launches("gemm_all_reduce", at_least=2 * 6)
    if pair.on_gpu:
        freed, kept = held_mib[1] - held_mib[0], held_mib[3] - held_mib[2]
        assert 0 < freed < kept, held_mib
    return {"held_mib": held_mib, "free_mib": free_mib}


CASES = {
    "give_back": ended_groups_give_back,
    "graphs": graphs_outlive_their_groups,
    "threads": threads_make_memory,
    "reported": report_of_an_ended_group,
    "nodes": memory_of_nodes,
}
