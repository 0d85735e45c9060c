"""Two processes, each a node of its own, joined by proxies: operators and compiled models over the network.

`MKCOMPILE_NODE` differs by rank and `MKCOMPILE_NETWORK` names the transport. The GPUs may be joined by NVLink: nothing
of a peer is mapped, save over the emulated network.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import mkcompile
from mkcompile.backend import mkernel
from mkcompile.config import settings
from mkcompile.errors import PeerTimeoutError, TransportError
from mkcompile.runtime.gather_operation import GatherOperation
from mkcompile.runtime.operation import Operation
from tests.gpu.compiled_cases import _sizes, compare
from tests.gpu.pair import KERNELS, Pair, Product

_ALWAYS: dict[str, Any] = {"mkernel.fuse": "always"}
_GRACE_S = 3.0


def expect_network(pair: Pair) -> set[str]:
    """All that was launched went over nodes. Returns the operators."""
    if not pair.on_gpu:
        return set()
    known = [one for one in pair.launcher._operations.values() if isinstance(one, (Operation, GatherOperation))]
    kernels = [one.kernel for one in known if one.kernel is not None]
    assert kernels and all(kernel.config.network == "flat" for kernel in kernels), [one.config.name for one in kernels]
    return {kernel.config.operator for kernel in kernels}


def products(pair: Pair) -> dict[str, Any]:
    """Reductions of several sizes, random and exact, back to back."""
    # NCCL connects at its first gather; what it frees then waits for our kernel, which waits for the proxy's copies
    pair.same_on_all_ranks(pair.draw(512, 1024, seed=1, rank=0), "before anything fused")
    pair.meet()
    ratios = {}
    for seed, (rows, n, k) in enumerate(((512, 1024, 264), (1000, 520, 1032), (8, 256, 128), (2048, 2048, 512))):
        for operator in KERNELS:
            for integers in (False, True):
                one = Product(operator=operator, rows=rows, n=n, k=k, integers=integers, seed=seed, bias=seed == 1)
                ratios[one.name] = round(one.check(pair, one.call(pair, *one.inputs(pair, pair.rank))), 3)
    pair.expect_launches("gemm_all_reduce", at_least=8)
    return {"ratios": ratios, "operators": sorted(expect_network(pair))}


def replays(pair: Pair) -> dict[str, Any]:
    """A captured all-reduce, replayed with other numbers; the proxies know nothing of graphs."""
    one = Product(operator="gemm_all_reduce", rows=512, n=1024, k=264, integers=True, seed=30)
    x, w, bias = one.inputs(pair, pair.rank)
    one.call(pair, x, w, bias)
    pair.meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # the proxy's thread calls the driver meanwhile
        out = one.call(pair, x, w, bias)
    for seed in range(31, 51):
        other = Product(operator="gemm_all_reduce", rows=512, n=1024, k=264, integers=True, seed=seed)
        x.copy_(other.inputs(pair, pair.rank)[0])
        w.copy_(other.inputs(pair, pair.rank)[1])
        pair.meet()
        graph.replay()
        torch.cuda.synchronize()
        mkcompile.check()
        other.check(pair, out)
    return {}


def _compiled(pair: Pair, sequence: bool) -> dict[str, Any]:
    torch._dynamo.reset()
    ratios = compare(_sizes(pair, sequence), pair, lambda model: torch.compile(model, backend=mkernel, options=_ALWAYS))
    return {"ratios": ratios, "launched": dict(pair.launcher.launched), "operators": sorted(expect_network(pair))}


def tensor_parallel(pair: Pair) -> dict[str, Any]:
    """All-reduces forward and backward, by the backend as users have it."""
    found = _compiled(pair, sequence=False)
    pair.expect_launches("gemm_all_reduce", at_least=2 * 3)
    return found


def sequence_parallel(pair: Pair) -> dict[str, Any]:
    """Gathers and reduce-scatters, forward and backward."""
    found = _compiled(pair, sequence=True)
    pair.expect_launches("gemm_reduce_scatter", at_least=2 * 3)
    pair.expect_launches("all_gather_gemm", at_least=3)
    return found


def killed_peer(pair: Pair) -> dict[str, Any]:
    """Rank 1 is killed between launches: rank 0 is told of it in time, by name, and goes on unfused."""
    product = Product(operator="gemm_all_reduce", rows=512, n=1024, k=264, integers=True, seed=40)
    operands = product.inputs(pair, pair.rank)
    product.check(pair, product.call(pair, *operands))
    pair.meet()
    if pair.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started, caught = time.monotonic(), ""
    while not caught and time.monotonic() - started < 3 * settings().timeout_s:
        try:
            product.call(pair, *operands)
            torch.cuda.synchronize()
            mkcompile.check()
        except (TransportError, PeerTimeoutError) as error:
            caught = f"{type(error).__name__}: {error}"
            assert error.report.peer == 1, caught
    waited_s = time.monotonic() - started
    assert caught and waited_s < settings().timeout_s + _GRACE_S, f"{waited_s:.1f} s, {caught}"
    model = nn.Linear(256, 512).to(pair.device, torch.bfloat16)
    loss = torch.compile(model)(pair.draw(64, 256, seed=1)).float().square().mean()
    loss.backward()
    assert torch.isfinite(loss) and dist.is_initialized()
    return {"waited_s": round(waited_s, 2), "error": caught}


CASES = {
    "products": products,
    "replays": replays,
    "tensor_parallel": tensor_parallel,
    "sequence_parallel": sequence_parallel,
    "killed_peer": killed_peer,
}
