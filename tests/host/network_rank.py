"""What each of four ranks on two nodes does in `test_network_reference`; each enters its node's network namespace.

Ranks 0 and 2 are on the first node, 1 and 3 on the second. Values are small integers: every order of sums is exact.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.spawn import set_environment

WORLD_SIZE = 4
LIMIT_S = 4.0
_NEW_NETWORK = 0x40000000


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Namespaces of the two nodes and the link between them; no names: loopback. `folder`: where the ranks meet."""

    folder: str
    names: tuple[str, ...] = ()
    link: str = ""


def join(rank: int, where: Where) -> None:
    """Enter the rank's node and the group of all ranks; once a process."""
    if dist.is_initialized():
        return
    node = rank % 2
    set_environment({"MKCOMPILE_NODE": f"node {node}"})
    if where.names:
        os.environ["GLOO_SOCKET_IFNAME"] = where.link
        descriptor = os.open(f"/run/netns/{where.names[node]}", os.O_RDONLY)
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.setns(descriptor, _NEW_NETWORK) == 0, os.strerror(ctypes.get_errno())
        os.close(descriptor)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{where.folder}/rendezvous",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=100),
    )


def integers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Different on each rank."""
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


class Model(nn.Module):
    """A tensor-parallel layer, then a sequence-parallel one: all-reduce, all-gather and reduce-scatter, each way."""

    def __init__(self, group: str, width: int = 24, hidden: int = 40) -> None:
        super().__init__()
        sizes = ((width, hidden), (hidden, width)) * 2
        self.linears = nn.ModuleList(nn.Linear(k, n, bias=False) for k, n in sizes)
        for i, linear in enumerate(self.linears):
            linear.weight.data = integers(*linear.weight.shape, seed=i)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        from tests.regions import CopyToRegion, GatherFromSequence, ReduceFromRegion, ScatterToSequence

        up, down, wide, narrow = self.linears
        x = ReduceFromRegion.apply(down(up(CopyToRegion.apply(x, 0, self.group))), 0, self.group)
        rows = x.shape[0] // WORLD_SIZE
        own = x.narrow(0, dist.get_rank() * rows, rows)
        return ScatterToSequence.apply(narrow(wide(GatherFromSequence.apply(own, 0, self.group))), 0, self.group)


def gradients_of(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    """The result and the gradients of its weighted sum."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = call(x)
    (out * integers(*out.shape, seed=9)).sum().backward()
    return [out.detach(), *(one.grad.clone() for one in (x, *model.parameters()) if one.grad is not None)]


def network() -> Any:
    """The network reference that is installed."""
    from mkcompile.ops import registry
    from mkcompile.runtime.dispatch import Dispatch

    launcher = registry.launcher()
    assert isinstance(launcher, Dispatch)
    return launcher._network


@contextmanager
def installed(source: Any) -> Iterator[None]:
    """Another one for a while."""
    from mkcompile.ops import registry
    from mkcompile.runtime.agree import Agreement
    from mkcompile.runtime.dispatch import Dispatch

    before = registry.launcher()
    registry.set_launcher(Dispatch(Agreement(), None, source))
    try:
        yield
    finally:
        registry.set_launcher(before)


def sent_by(source: Any, group: str) -> dict[str, int]:
    """The counters of the group's proxy."""
    counters: dict[str, int] = source._groups[group].place.channels.proxy.counters()
    return counters


def compiled_case(rank: int, world_size: int, where: Where) -> dict[str, Any]:
    """torch.compile of the model, forward and backward, three steps, bit for bit the eager one."""
    join(rank, where)
    model = Model("0")
    inputs = [torch.arange(8.0 * 24).reshape(8, 24).remainder(5 + step) for step in range(3)]
    want = [gradients_of(model, model, x) for x in inputs]
    from mkcompile.runtime.machine import basis_of

    call = torch.compile(model, backend="mkernel", options={"mkernel.fuse": "always"})
    got = [gradients_of(call, model, x) for x in inputs]
    equal = [torch.equal(a, b) for one, other in zip(want, got, strict=True) for a, b in zip(one, other, strict=True)]
    source = network()
    place = source._groups["0"].place
    return {
        "equal": equal,
        "device": place.channels.proxy.device,
        "placement": str(place.placement),
        "planned": str(basis_of("probe", "0").placement),
        "counters": sent_by(source, "0"),
        "sites": counted(call, model, inputs[0]),
    }


def counted(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[str]:
    """The operators of one more step."""
    from tests.backend.calls import watched_calls

    with watched_calls() as calls:
        gradients_of(call, model, x)
    return sorted(one.NAME for one in calls)


def shaped_calls(group: str, world: int) -> Iterator[Any]:
    """Calls of every form, in and beyond one message."""
    from mkcompile.ops.all_gather_gemm import AllGatherGemm
    from mkcompile.ops.gemm_all_reduce import GemmAllReduce
    from mkcompile.ops.gemm_reduce_scatter import GemmReduceScatter

    for m, n, dtype in ((1, 8, torch.float32), (7, 24, torch.bfloat16), (61, 512, torch.float32)):
        x, w, bias = integers(m, 5, dtype=dtype), integers(5, n, seed=1, dtype=dtype), integers(n, seed=2, dtype=dtype)
        yield GemmAllReduce([x], [w], bias, "sum", world, group, "")
        yield GemmAllReduce([x, 2 * x], [w, w], None, "sum", world, group, "")
        rows = integers(world * m, 5, seed=3, dtype=dtype)
        yield GemmReduceScatter([rows], [w], bias, [world * m, n], 0, "sum", world, group, "")
        yield GemmReduceScatter([rows], [w], None, [m, world, n], 1, "sum", world, group, "")
        wide = integers(5, world * n, seed=4, dtype=dtype)
        yield GemmReduceScatter([x], [wide], None, [m, world * n], 1, "sum", world, group, "")
        shard = integers(m, n, seed=5, dtype=dtype)
        down = integers(n, 6, seed=6, dtype=dtype)
        yield AllGatherGemm(shard, [down, down], [None, bias[:6]], [0, 0], 0, True, world, group, "")
        yield AllGatherGemm(shard.unsqueeze(0), [down], [None], [0], 1, False, world, group, "")
        yield AllGatherGemm(
            shard, [integers(world * m, 4, seed=7, dtype=dtype)], [None], [1], 0, False, world, group, ""
        )
    # means of integers by 2 and 4 are exact
    if world in (2, 4):
        yield GemmAllReduce([4 * integers(9, 3)], [integers(3, 8, seed=8)], None, "avg", world, group, "")


def calls_case(rank: int, world_size: int, where: Where) -> dict[str, list[bool]]:
    """By hand, over groups of 2x2, 2x1, 3x1 and 4x1 ranks, against the functional collectives."""
    from mkcompile.runtime.network_reference import NetworkReference

    join(rank, where)
    found: dict[str, list[bool]] = {}
    groups = {"2x2": range(4), "2x1": range(2), "3x1": range(3), "4x1": range(4)}
    for name, ranks in groups.items():
        group = dist.new_group(list(ranks))
        if rank not in ranks:
            continue
        node = {"3x1": rank, "4x1": rank}.get(name, rank % 2)
        source = NetworkReference(lambda node=node: f"node {node}")
        found[name] = []
        for call in shaped_calls(group.group_name, len(ranks)):
            got, want = source(call), call.reference()
            pairs = zip(got, want, strict=True) if isinstance(want, list) else [(got, want)]
            found[name].append(all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs))
        assert str(source._groups[group.group_name].place.placement) == name
        dist.barrier(group)
        source.close()
    return found


def rounded_case(rank: int, world_size: int, where: Where) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers that sums round: this rank's result, a second one, and the truth."""
    from mkcompile.ops.gemm_all_reduce import GemmAllReduce

    join(rank, where)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(33, 16, generator=generator).to(torch.bfloat16)
    w = torch.randn(16, 24, generator=generator).to(torch.bfloat16)
    call = GemmAllReduce([x], [w], None, "sum", world_size, "0", "")
    first, again = (network()(call) for _ in range(2))
    truth = x.double() @ w.double()
    dist.all_reduce(truth)
    return first, again, truth


def uneven_case(rank: int, world_size: int, where: Where) -> tuple[Any, str]:
    """Three ranks on one node, one on the other: left to the reference."""
    from mkcompile.ops.gemm_all_reduce import GemmAllReduce
    from mkcompile.runtime.network_reference import NetworkReference

    join(rank, where)
    source = NetworkReference(lambda: f"node {rank // 3}")
    call = GemmAllReduce([integers(4, 4)], [integers(4, 8)], None, "sum", world_size, "0", "")
    return source(call), source._groups["0"].obstacle


@contextmanager
def short_deadline() -> Iterator[None]:
    """For what joins the network from now on."""
    from mkcompile.runtime.network_reference import channels, source

    asked = replace(source.settings(), timeout_s=LIMIT_S)
    before = source.settings
    source.settings = channels.settings = lambda: asked
    try:
        yield
    finally:
        source.settings = channels.settings = before


def flap_case(rank: int, world_size: int, where: Where) -> dict[str, Any]:
    """The link goes down in the midst of steps, and comes again: one error on each rank, then the unfused path.

    A rank may wait for one of its own node, which has not noticed yet, until its own deadline.
    """
    from mkcompile.errors import PeerLostError, PeerTimeoutError
    from mkcompile.runtime.network_reference import NetworkReference

    join(rank, where)
    model = Model("0")
    x = torch.arange(8.0 * 24).reshape(8, 24).remainder(7)
    want = gradients_of(model, model, x)
    call = torch.compile(model, backend="mkernel", options={"mkernel.fuse": "always"})
    source = NetworkReference()
    with short_deadline(), installed(source):
        gradients_of(call, model, x)
        dist.barrier()
        if rank == 0:
            subprocess.run(["ip", "link", "set", where.link, "down"], check=True)
        started, error = time.monotonic(), ""
        try:
            while True:
                gradients_of(call, model, x)
        except (PeerLostError, PeerTimeoutError) as caught:
            error = type(caught).__name__
        took_s = time.monotonic() - started
        if rank == 0:
            subprocess.run(["ip", "link", "set", where.link, "up"], check=True)
        dist.barrier()
        got = gradients_of(call, model, x)
    equal = [torch.equal(a, b) for a, b in zip(want, got, strict=True)]
    return {"error": error, "took_s": took_s, "equal": equal, "obstacle": source._groups["0"].obstacle}


def killed_case(rank: int, world_size: int, where: Where) -> dict[str, Any]:
    """Rank 3 is killed; the last case. The others name a lost peer, and go on with the ranks of their node."""
    from mkcompile.errors import PeerLostError
    from mkcompile.ops.gemm_all_reduce import GemmAllReduce
    from mkcompile.runtime.network_reference import NetworkReference

    join(rank, where)
    nodes = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    source = NetworkReference()
    call = GemmAllReduce([integers(300, 16)], [integers(16, 256)], None, "sum", world_size, "0", "")
    source(call)
    dist.barrier()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    started, peer = time.monotonic(), -1
    try:
        for _ in range(1000):
            source(call)
    except PeerLostError as caught:
        peer = caught.report.peer
    took_s, works = time.monotonic() - started, True
    if rank != 1:
        w = torch.eye(4)

        def layer(x: Tensor) -> Tensor:
            return dist._functional_collectives.all_reduce(x @ w, "sum", nodes[0])

        out = torch.compile(layer, backend="mkernel", options={"mkernel.fuse": "always"})(torch.ones(2, 4))
        works = bool((out == 2).all())
    return {"took_s": took_s, "peer": peer, "works": works, "later": source(call)}
