"""What goes wrong between ranks: named within the deadline, and the process goes on. MKCOMPILE_TIMEOUT_S is short."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import mkcompile
from mkcompile.config import settings
from mkcompile.errors import (
    LaunchMismatchError,
    LaunchOrderError,
    MkcompileError,
    PeerGaveUpError,
    PeerTimeoutError,
    WorkspaceError,
)
from mkcompile.runtime.gather_operation import GatherOperation
from mkcompile.runtime.gather_schedule import Variant
from mkcompile.runtime.operation import Operation
from mkcompile.runtime.workspace import Workspace
from tests.gpu.gather_cases import Gather, only, prepared
from tests.gpu.pair import KERNELS, Pair, Product

TRIES = 6
#: What launches that meet on one workspace may raise.
_OF_A_MEETING = (LaunchOrderError, LaunchMismatchError, PeerGaveUpError, PeerTimeoutError, WorkspaceError)
#: Gathers that rank 0 launches alone behind an all-reduce.
ALONE: dict[str, tuple[Variant, ...]] = {"dead": ("push", "copy_engine"), "killed": ("pull", "library", "stream")}


def _product(operator: str = "gemm_all_reduce", seed: int = 1) -> Product:
    return Product(operator=operator, rows=512, n=1024, k=264, integers=True, seed=seed)


def _good_launches(pair: Pair) -> None:
    for operator in KERNELS:
        product = _product(operator)
        product.check(pair, product.call(pair, *product.inputs(pair, pair.rank)))
    pair.meet()


def _gather(seed: int = 1) -> Gather:
    return Gather(shape=(256, 264), n=(1024,), integers=True, seed=seed)


@dataclass(frozen=True, slots=True)
class _Lonely:
    """A gather of a group of its own: after a fault on one workspace the others are as they were."""

    variant: Variant
    run: Callable[[], object]

    @staticmethod
    def of(pair: Pair, variant: Variant) -> _Lonely:
        """Made once, by both ranks."""
        group = dist.new_group([0, 1], device_id=pair.device)
        assert isinstance(group, ProcessGroup)
        return _Lonely(variant, prepared(pair, _gather(), variant, group.group_name)[0])

    def give_up(self) -> str:
        """Launched by rank 0 alone: an error in time that names rank 1."""
        started, text = time.monotonic(), ""
        self.run()
        torch.cuda.synchronize()
        waited_s = time.monotonic() - started
        try:
            mkcompile.check()
        except PeerTimeoutError as error:
            text = f"{self.variant}: {error}"
            assert (error.report.operator, error.report.rank, error.report.peer) == ("all_gather_gemm", 0, 1), text
        assert text, f"{self.variant}: nothing was reported"
        assert waited_s < settings().timeout_s + 3, f"{self.variant} took {waited_s:.1f} s to give up"
        return text


def _lonely_rank(pair: Pair, gathers: Sequence[_Lonely]) -> dict[str, Any]:
    """Rank 0 calls alone: an error in time that names rank 1, again where it tries again; unfused work goes on."""
    timeout_s = settings().timeout_s
    product = _product()
    operands = product.inputs(pair, pair.rank)
    product.call(pair, *operands)
    started = time.monotonic()
    torch.cuda.synchronize()
    kernel_s = time.monotonic() - started
    assert kernel_s < timeout_s + 3, f"the kernel took {kernel_s:.1f} s to give up"
    texts, waits = [], []
    for _ in range(2):
        started = time.monotonic()
        try:
            product.call(pair, *operands)
        except PeerTimeoutError as error:
            texts.append(str(error))
            assert error.report.peer == 1 and error.report.rank == 0, str(error)
        waits.append(round(time.monotonic() - started, 2))
    assert len(texts) == 2, texts
    assert "expected" in texts[0] and "did not come" in texts[1], texts
    assert max(waits) < timeout_s + 3, waits
    texts += [one.give_up() for one in gathers]
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to(pair.device, torch.bfloat16)
    compiled = torch.compile(model)
    loss = compiled(pair.draw(64, 256, seed=1)).float().square().mean()
    loss.backward()
    assert torch.isfinite(loss)
    return {"kernel_s": round(kernel_s, 2), "errors": texts, "waits_s": waits, "unfused_loss": loss.item()}


def dead_peer(pair: Pair) -> dict[str, Any]:
    """Rank 1 ends in good order and never launches again."""
    _good_launches(pair)
    gathers = [_Lonely.of(pair, variant) for variant in ALONE["dead"]]
    pair.meet()
    if pair.rank == 1:
        os._exit(0)
    return _lonely_rank(pair, gathers)


def killed_peer(pair: Pair) -> dict[str, Any]:
    """Rank 1 is killed in the middle of a row of launches."""
    _good_launches(pair)
    gathers = [_Lonely.of(pair, variant) for variant in ALONE["killed"]]
    pair.meet()
    product = _product()
    operands = product.inputs(pair, pair.rank)
    for one in gathers:
        one.run()
    for _ in range(3):
        product.call(pair, *operands)
    torch.cuda.synchronize()
    if pair.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return _lonely_rank(pair, gathers)


def late_peer(pair: Pair) -> dict[str, Any]:
    """Rank 1 comes after the deadline. Both try again until both are through: then the workspace is a new one."""
    return _late(pair, _product(seed=2))


def late_gatherer(pair: Pair) -> dict[str, Any]:
    """The same of gathers, by blocks and by the copy engine, whose area is a new one, too."""
    errors = []
    for variant in ("push", "copy_engine"):
        with only(pair, variant):
            errors += _late(pair, _gather(seed=2))["errors"]
    return {"errors": errors}


def _late(pair: Pair, problem: Product | Gather) -> dict[str, Any]:
    call, check = _once(pair, problem)
    check(call())  # what the ranks have to agree on they have
    _good_launches(pair)
    first = pair.launcher.workspace(pair.group, pair.device)
    if pair.rank == 1:
        torch.cuda.synchronize()
        time.sleep(settings().timeout_s + 2)  # the lateness that is tested
    errors = []
    for _ in range(TRIES):
        try:
            out = call()
            torch.cuda.synchronize()
            pair.launcher.check()
        except (PeerTimeoutError, PeerGaveUpError) as error:
            errors.append(str(error))
            continue
        if pair.launcher.workspace(pair.group, pair.device) is not first:
            break
    assert errors, "nobody was late"
    assert pair.launcher.workspace(pair.group, pair.device) is not first, errors
    check(out)
    for operator in KERNELS:
        again = _product(operator, seed=5)
        again.check(pair, again.call(pair, *again.inputs(pair, pair.rank)))
    return {"errors": errors}


def _once(pair: Pair, problem: Product | Gather) -> tuple[Callable[[], Tensor], Callable[[Tensor], object]]:
    """A call with its operands, and what looks at its result; truths are worked out now."""
    if isinstance(problem, Product):
        operands, expected = problem.inputs(pair, pair.rank), problem.expected(pair)
        return partial(problem.call, pair, *operands), lambda out: problem.check(pair, out, expected)
    shard, (w, bias) = problem.shard(pair, pair.rank), problem.operands(pair)
    return (
        lambda: problem.call(pair, shard, w, bias)[0],
        lambda out: problem.check(pair, [out], w, bias, "after an error"),
    )


def replay_beside_eager(pair: Pair) -> dict[str, Any]:
    """Small launches of a graph and of eager calls meet on one workspace: an error or a right result, never a hang.

    What of the graph runs after the error has been taken says so, too.

    Of few blocks, and too many rows for the kernels that take all SMs: else no two launches are there at a time.
    """
    return _beside_eager(pair, Product(operator="gemm_all_reduce", rows=1280, n=64, k=64, integers=True, seed=1))


def gather_beside_eager(pair: Pair) -> dict[str, Any]:
    """The same of gathers, whose rows are fetched: pushes of so many rows take all SMs."""
    with only(pair, "pull"):
        return _beside_eager(pair, Gather(shape=(640, 64), n=(64,), integers=True, seed=1))


def _beside_eager(pair: Pair, problem: Product | Gather) -> dict[str, Any]:
    call, check = _once(pair, problem)
    call()
    grid, num_sms = _grid_of_newest(pair)
    assert 2 * grid <= num_sms, "no two launches have room"
    pair.meet()
    gc.collect()  # a graph of an earlier case that goes while this one is captured would end the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(300):
            call()
    beside = torch.cuda.Stream()
    with torch.cuda.stream(beside):  # the first launch of a second stream waits for all of the first: see LaunchChain
        call()
    pair.meet()
    errors = []
    graph.replay()
    try:
        with torch.cuda.stream(beside):
            for _ in range(100):
                call()
    except _OF_A_MEETING as error:
        errors.append(f"{type(error).__name__}: {error}")
    started = time.monotonic()
    torch.cuda.synchronize()
    drained_s = time.monotonic() - started
    assert drained_s < 4 * settings().timeout_s, f"{drained_s:.1f} s"
    for _ in range(TRIES):
        try:
            out = call()
            torch.cuda.synchronize()
            pair.launcher.check()
        except _OF_A_MEETING as error:
            errors.append(f"{type(error).__name__}: {error}")
            continue
        break
    check(out)
    graph.reset()
    assert errors, "the launches did not meet: nothing was tested"
    assert any("CUDA graph was replayed" in text for text in errors), errors
    return {"errors": errors, "drained_s": round(drained_s, 2)}


def _grid_of_newest(pair: Pair) -> tuple[int, int]:
    """Blocks of the newest operation, and SMs."""
    one = list(pair.launcher._operations.values())[-1]
    assert isinstance(one, (Operation, GatherOperation)) and one.kernel is not None
    assert not one.kernel.config.streams
    grid = one.choice.schedule.grid if isinstance(one, GatherOperation) else one.schedule.grid
    return grid, one.device.num_sms


def _recovers(pair: Pair, first: Workspace) -> list[str]:
    """Both ranks are at one call again within a few errors, on a new workspace, and it is right. Returns the errors.

    A rank that comes late may find all that it needs of a launch that the other has given up: it goes on until it, too,
    is on a workspace other than `first`.
    """
    product = _product(seed=7)
    operands, expected = product.inputs(pair, pair.rank), product.expected(pair)
    errors = []
    for _ in range(TRIES):
        try:
            out = product.call(pair, *operands)
            mkcompile.check()
        except MkcompileError as error:
            errors.append(f"{type(error).__name__}: {error}")
            continue
        if pair.launcher.workspace(pair.group, pair.device) is not first:
            product.check(pair, out, expected)
            return errors
    raise AssertionError(errors)


def skipped_call(pair: Pair) -> dict[str, Any]:
    """Rank 1 leaves one call out: both find the other at another launch, long before the deadline, and say at which."""
    return _skipped(pair, _product(seed=1), "gemm_all_reduce 512x1024x264")


def skipped_gather(pair: Pair) -> dict[str, Any]:
    """The same where the call is a gather."""
    with only(pair, "push"):
        return _skipped(pair, _gather(), "all_gather_gemm 512x1024x264")


def _skipped(pair: Pair, skipped: Product | Gather, name: str) -> dict[str, Any]:
    next_one = Product(operator="gemm_reduce_scatter", rows=384, n=512, k=136, seed=2)
    operands = next_one.inputs(pair, pair.rank)
    call, _ = _once(pair, skipped)
    call()
    next_one.call(pair, *operands)
    pair.meet()
    first = pair.launcher.workspace(pair.group, pair.device)
    started = time.monotonic()
    if pair.rank == 0:
        call()
    text = ""
    try:  # rank 0 may learn it from the call, where the kernels have met by then
        next_one.call(pair, *operands)
        mkcompile.check()
    except LaunchMismatchError as error:
        text = str(error)
    waited_s = time.monotonic() - started
    assert name in text and "gemm_reduce_scatter 768x512x136" in text, text
    assert "rank 0" in text and "rank 1" in text and "never launched" not in text, text
    assert waited_s < settings().timeout_s, f"found after {waited_s:.1f} s"
    return {"error": text, "waited_s": round(waited_s, 2), "errors_until_together": _recovers(pair, first)}


def replay_on_failed_workspace(pair: Pair) -> dict[str, Any]:
    """A graph that was captured before a fault is replayed after it: an error each time, not silence."""
    product = _product(seed=3)
    operands = product.inputs(pair, pair.rank)
    product.call(pair, *operands)
    pair.meet()
    first = pair.launcher.workspace(pair.group, pair.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product.call(pair, *operands)
    pair.meet()
    graph.replay()
    pair.meet()
    mkcompile.check()
    errors = []
    if pair.rank == 0:
        for _ in range(3):  # alone: the first waits for rank 1
            graph.replay()
            try:
                mkcompile.check()
            except (PeerTimeoutError, WorkspaceError) as error:
                errors.append(f"{type(error).__name__}: {error}")
        assert len(errors) == 3 and errors[0].startswith("PeerTimeoutError"), errors
        assert all("replayed on a workspace that had failed" in text for text in errors[1:]), errors
    dist.barrier()
    return {"errors": errors, "errors_until_together": _recovers(pair, first)}


CASES = {
    "dead": dead_peer,
    "killed": killed_peer,
    "late": late_peer,
    "late_gather": late_gatherer,
    "in_use": replay_beside_eager,
    "in_use_gather": gather_beside_eager,
    "skipped": skipped_call,
    "skipped_gather": skipped_gather,
    "replayed": replay_on_failed_workspace,
}
