"""All-gather + GEMM over several nodes: a proxy for each rank, over the emulated network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from mkcompile.errors import LaunchMismatchError, PeerTimeoutError
from mkcompile.runtime.gather_launch import GatherSize
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.proxy import Link

from .broken_kernels import NO_CHUNK_WAIT
from .marks import NODES_ON_ONE_AND_TWO_GPUS
from .network_gather_calls import Movers, config_of, make_call
from .network_ranks import FAST, LINK_50, SHUFFLED_50, SLOW_SHUFFLED, NodeGroup, node_group
from .ranks import nan_outputs, random_input
from .test_negative_controls import load_broken
from .test_reductions import expected_of
from .truth import assert_bitwise, summed

#: Devices by node, and how many nodes: on one GPU, 2x1, 3x1, 4x1, 2x2, 3x2 and 2x4.
SHAPES = (((0,) * 2, 2), ((0,) * 3, 3), ((0,) * 4, 4), ((0,) * 4, 2), ((0,) * 6, 3), ((0,) * 8, 2))
LINKS = {"fast": FAST, "slow_shuffled": SLOW_SHUFFLED}


@pytest.fixture(
    scope="module",
    params=[(shape, link) for shape in SHAPES for link in LINKS],
    ids=lambda param: f"{param[0][1]}x{len(param[0][0]) // param[0][1]}-{param[1]}",
)
def ranks(request: pytest.FixtureRequest) -> Iterator[tuple[NodeGroup, Movers]]:
    """One group for all tests of a shape: calls share its workspaces, as operators of a model do."""
    (devices, nodes), link = request.param
    with node_group(devices, nodes, LINKS[link]) as group:
        yield group, Movers.of(group)


def check(
    group: NodeGroup, movers: Movers, config: KernelConfig, size: GatherSize, *, epochs: int = 3,
    late: Sequence[int] = (), returned: bool = False, group_rows: int = 0,
) -> None:  # fmt: skip
    """Launches that follow each other without a pause, each with its own operands: the last close, the others exact."""
    calls = [
        make_call(
            group, movers, config, size, seed=seed, integers=seed + 1 < epochs, returned=returned, group_rows=group_rows
        )
        for seed in range(epochs)
    ]  # fmt: skip
    group.synchronize()
    for seed, call in enumerate(calls):
        for rank in late:
            group.delay(rank)
        call.run(group)
        if seed == 0:
            group.synchronize()
            group.check()
    group.synchronize()
    group.check()
    for seed, call in enumerate(calls):
        call.check(exact=seed + 1 < epochs, what=f"epoch {seed}")


def test_rows_of_all_nodes(ranks: tuple[NodeGroup, Movers]) -> None:
    group, movers = ranks
    check(group, movers, config_of(group), GatherSize(segment_rows=512, k=512, n=(1024,), world=group.world))


def test_odd_sizes_layouts_products_and_bias(ranks: tuple[NodeGroup, Movers]) -> None:
    group, movers = ranks
    for tile, rows, n, others in (
        ((128, 128), 333, (520, 8), {"has_bias": True, "weight_layout": "kn"}),
        ((64, 64), 1000, (264, 72, 136), {"dtype": "float16"}),
        ((128, 256), 1, (520,), {}),
    ):
        config = config_of(group, tile, **others)
        size = GatherSize(segment_rows=rows, k=264, n=n, world=group.world)
        check(group, movers, config, size, group_rows=100, returned=rows == 333)


def test_rows_in_segments_that_are_returned(ranks: tuple[NodeGroup, Movers]) -> None:
    group, movers = ranks
    size = GatherSize(segment_rows=200, segments=3, k=136, n=(264,), world=group.world)
    check(group, movers, config_of(group, (128, 128)), size, returned=True, group_rows=128)


def test_late_ranks(ranks: tuple[NodeGroup, Movers]) -> None:
    group, movers = ranks
    size = GatherSize(segment_rows=256, k=264, n=(520,), world=group.world)
    for late in sorted({0, group.world // 2, group.world - 1}):
        check(group, movers, config_of(group, (128, 128)), size, epochs=4, late=[late], group_rows=64)


def test_operators_alternate(ranks: tuple[NodeGroup, Movers]) -> None:
    group, movers = ranks
    reducing = KernelConfig(
        operator="gemm_all_reduce", broadcast="staged", block_n=128, network=group.network  # type: ignore[arg-type]
    )  # fmt: skip
    reductions, calls = [], []
    for i in range(3):
        inputs = [random_input(r, d, 200, 520, 136, reducing, i, True) for r, d in enumerate(group.devices)]
        outs = nan_outputs(group, 200, 520, reducing)
        reductions.append((inputs, outs, group.prepare(reducing, inputs, outs)))
        size = GatherSize(segment_rows=100 * (i + 1), k=264, n=(264,), world=group.world)
        calls.append(make_call(group, movers, config_of(group, (128, 128)), size, seed=i, integers=True))
    group.synchronize()
    for (_, _, launches), call in zip(reductions, calls, strict=True):
        group.delay(group.world - 1)
        call.run(group)
        group.run(launches)
    group.synchronize()
    group.check()
    for i, (inputs, outs, _) in enumerate(reductions):
        calls[i].check(exact=True, what=f"gather {i}")
        truth, _ = summed(inputs, reducing, "cuda:0")
        for rank, out in enumerate(outs):
            assert_bitwise(out.to("cuda:0"), expected_of(reducing, rank, group.world, truth), f"sum {i} rank {rank}")


def test_graph_replays() -> None:
    with node_group((0, 0), 2) as group:
        movers, config = Movers.of(group), config_of(group, (128, 128))
        size = GatherSize(segment_rows=500, k=264, n=(520,), world=2)
        call, graphs = make_call(group, movers, config, size, integers=True, returned=True), []
        for rank in range(2):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=group.streams[rank], capture_error_mode="thread_local"):
                call.prepared[rank].run(None, torch.cuda.current_stream().cuda_stream, True)
            graphs.append(graph)
        for replay in range(20):
            fresh = make_call(group, movers, config, size, seed=replay + 1, integers=True)
            for rank in range(2):
                call.tensors[rank].shard.copy_(fresh.tensors[rank].shard)
                call.tensors[rank].outs[0].fill_(float("nan"))
            torch.cuda.synchronize()
            for rank in range(2):
                with torch.cuda.stream(group.streams[rank]):
                    graphs[rank].replay()
            group.synchronize()
            group.check()
            call.check(exact=True, what=f"replay {replay}")


@pytest.mark.parametrize(("devices", "nodes", "missing", "waiting"), [((0, 0), 2, 1, 0), ((0,) * 4, 2, 2, 0)])
def test_a_rail_peer_that_never_launches_is_named(
    devices: Sequence[int], nodes: int, missing: int, waiting: int
) -> None:
    group = NodeGroup(tuple(devices), nodes=nodes, timeout_s=0.5)
    size = GatherSize(segment_rows=256, k=264, n=(520,), world=group.world)
    call = make_call(group, Movers.of(group), config_of(group, (128, 128)), size)
    for rank in range(group.world):
        if rank != missing:
            with torch.cuda.device(group.devices[rank]), torch.cuda.stream(group.streams[rank]):
                call.prepared[rank].run(None, torch.cuda.current_stream().cuda_stream, False)
    group.synchronize()
    with pytest.raises(PeerTimeoutError, match="network") as caught:
        group.check_rank(waiting)
    assert (caught.value.report.rank, caught.value.report.peer) == (waiting, missing), str(caught.value)
    for proxy in group.proxies:
        proxy.close(0.5)


def test_a_rail_peer_at_another_launch_is_a_mismatch() -> None:
    group = NodeGroup((0, 0), nodes=2, timeout_s=0.5)
    movers, config = Movers.of(group), config_of(group, (128, 128))
    for rank, rows in enumerate((256, 200)):
        size = GatherSize(segment_rows=rows, k=264, n=(520,), world=2)
        call = make_call(group, movers, config, size)
        with torch.cuda.stream(group.streams[rank]):
            call.prepared[rank].run(None, torch.cuda.current_stream().cuda_stream, False)
    group.synchronize()
    with pytest.raises(LaunchMismatchError, match=r"rank 0 and rank 1|rank 1 and rank 0"):
        group.check()
    for proxy in group.proxies:
        proxy.close(0.5)


def test_rows_that_are_not_waited_for_are_noticed() -> None:
    group = NodeGroup((0, 0), nodes=2, timeout_s=2.0)
    config, size = config_of(group, (128, 128)), GatherSize(segment_rows=1024, k=264, n=(1024,), world=2)
    call = make_call(group, Movers.of(group), config, size, kernels=[load_broken(config, 0, NO_CHUNK_WAIT)] * 2)
    group.synchronize()
    group.delay(1, 20_000_000)
    call.run(group)
    group.synchronize()
    own, came = call.tensors[0].outs[0].view(2, 1024, 1024)
    assert torch.isfinite(own).all() and not torch.isfinite(came).all(), "the check can't tell missing rows"
    for proxy in group.proxies:
        proxy.close(0.5)


@pytest.mark.parametrize("link", [LINK_50, SHUFFLED_50], ids=["in_order", "shuffled"])
@NODES_ON_ONE_AND_TWO_GPUS
def test_large_products(link: Link, devices: Sequence[int], nodes: int) -> None:
    with node_group(devices, nodes, link, arena_bytes=300 << 20) as group:
        movers, world = Movers.of(group), group.world
        check(group, movers, config_of(group), GatherSize(segment_rows=2048, k=4096, n=(1024,), world=world), epochs=4)
        size = GatherSize(segment_rows=1000, k=328, n=(1032,), world=world)
        for late in range(world):
            check(group, movers, config_of(group, (128, 128)), size, late=[late], returned=late == 0)
