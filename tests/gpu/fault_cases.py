"""What goes wrong between ranks: named within the deadline, and the process goes on. MKCOMPILE_TIMEOUT_S is short."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import mkcompile
from mkcompile.config import settings
from mkcompile.errors import LaunchMismatchError, LaunchOrderError, MkcompileError, PeerTimeoutError, WorkspaceError
from mkcompile.runtime.workspace import Workspace
from tests.gpu.pair import KERNELS, Pair, Product

TRIES = 6


def _product(operator: str = "gemm_all_reduce", seed: int = 1) -> Product:
    return Product(operator=operator, rows=512, n=1024, k=264, integers=True, seed=seed)


def _good_launches(pair: Pair) -> None:
    for operator in KERNELS:
        product = _product(operator)
        product.check(pair, product.call(pair, *product.inputs(pair, pair.rank)))
    pair.meet()


def _lonely_rank(pair: Pair) -> dict[str, Any]:
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
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to(pair.device, torch.bfloat16)
    compiled = torch.compile(model)
    loss = compiled(pair.draw(64, 256, seed=1)).float().square().mean()
    loss.backward()
    assert torch.isfinite(loss)
    return {"kernel_s": round(kernel_s, 2), "errors": texts, "waits_s": waits, "unfused_loss": loss.item()}


def dead_peer(pair: Pair) -> dict[str, Any]:
    """Rank 1 ends in good order and never launches again."""
    _good_launches(pair)
    if pair.rank == 1:
        os._exit(0)
    return _lonely_rank(pair)


def killed_peer(pair: Pair) -> dict[str, Any]:
    """Rank 1 is killed in the middle of a row of launches."""
    _good_launches(pair)
    if pair.rank == 1:
        product = _product()
        operands = product.inputs(pair, pair.rank)
        for _ in range(3):
            product.call(pair, *operands)
        torch.cuda.synchronize()
        os.kill(os.getpid(), signal.SIGKILL)
    product = _product()
    operands = product.inputs(pair, pair.rank)
    for _ in range(3):
        product.call(pair, *operands)
    torch.cuda.synchronize()
    return _lonely_rank(pair)


def late_peer(pair: Pair) -> dict[str, Any]:
    """Rank 1 comes after the deadline. Both try again until both are through: then the workspace is a new one."""
    _good_launches(pair)
    first = pair.launcher.workspace(pair.group, pair.device)
    product = _product(seed=2)
    operands, expected = product.inputs(pair, pair.rank), product.expected(pair)
    if pair.rank == 1:
        torch.cuda.synchronize()
        time.sleep(settings().timeout_s + 2)  # the lateness that is tested
    errors = []
    for _ in range(TRIES):
        try:
            out = product.call(pair, *operands)
            torch.cuda.synchronize()
            pair.launcher.check()
        except PeerTimeoutError as error:
            errors.append(str(error))
            continue
        if pair.launcher.workspace(pair.group, pair.device) is not first:
            break
    assert errors, "nobody was late"
    assert pair.launcher.workspace(pair.group, pair.device) is not first, errors
    product.check(pair, out, expected)
    for operator in KERNELS:
        again = _product(operator, seed=5)
        again.check(pair, again.call(pair, *again.inputs(pair, pair.rank)))
    return {"errors": errors}


def replay_beside_eager(pair: Pair) -> dict[str, Any]:
    """Small launches of a graph and of eager calls meet on one workspace: an error or a right result, never a hang.

    What of the graph runs after the error has been taken says so, too.

    Of few blocks, and too many rows for the kernels that take all SMs: else no two launches are there at a time.
    """
    product = Product(operator="gemm_all_reduce", rows=1280, n=64, k=64, integers=True, seed=1)
    operands, expected = product.inputs(pair, pair.rank), product.expected(pair)
    product.call(pair, *operands)
    one = pair.launcher.operation("gemm_all_reduce")
    assert not one.kernel.config.streams and 2 * one.schedule.grid <= one.device.num_sms, "no two launches have room"
    pair.meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(300):
            product.call(pair, *operands)
    beside = torch.cuda.Stream()
    with torch.cuda.stream(beside):  # the first launch of a second stream waits for all of the first: see LaunchChain
        product.call(pair, *operands)
    pair.meet()
    errors = []
    graph.replay()
    try:
        with torch.cuda.stream(beside):
            for _ in range(100):
                product.call(pair, *operands)
    except (LaunchOrderError, PeerTimeoutError, WorkspaceError) as error:
        errors.append(f"{type(error).__name__}: {error}")
    started = time.monotonic()
    torch.cuda.synchronize()
    drained_s = time.monotonic() - started
    assert drained_s < 4 * settings().timeout_s, f"{drained_s:.1f} s"
    for _ in range(TRIES):
        try:
            out = product.call(pair, *operands)
            torch.cuda.synchronize()
            pair.launcher.check()
        except (LaunchOrderError, PeerTimeoutError, WorkspaceError) as error:
            errors.append(f"{type(error).__name__}: {error}")
            continue
        break
    product.check(pair, out, expected)
    assert errors, "the launches did not meet: nothing was tested"
    assert any("CUDA graph was replayed" in text for text in errors), errors
    return {"errors": errors, "drained_s": round(drained_s, 2)}


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
    skipped, next_one = _product(seed=1), Product(operator="gemm_reduce_scatter", rows=384, n=512, k=136, seed=2)
    for product in (skipped, next_one):
        product.call(pair, *product.inputs(pair, pair.rank))
    pair.meet()
    first = pair.launcher.workspace(pair.group, pair.device)
    started = time.monotonic()
    if pair.rank == 0:
        skipped.call(pair, *skipped.inputs(pair, pair.rank))
    text = ""
    try:  # rank 0 may learn it from the call, where the kernels have met by then
        next_one.call(pair, *next_one.inputs(pair, pair.rank))
        mkcompile.check()
    except LaunchMismatchError as error:
        text = str(error)
    waited_s = time.monotonic() - started
    assert "gemm_all_reduce 512x1024x264" in text and "gemm_reduce_scatter 768x512x136" in text, text
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
    "in_use": replay_beside_eager,
    "skipped": skipped_call,
    "replayed": replay_on_failed_workspace,
}
