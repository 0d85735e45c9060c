"""GEMM + reduce-scatter and GEMM + all-reduce over several nodes: a proxy for each rank, over the emulated network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from mkcompile.errors import LaunchMismatchError, PeerTimeoutError, ProxyUnavailableError, TransportError
from mkcompile.runtime.kernel_config import KernelConfig

from .broken_kernels import NO_NETWORK_WAIT
from .marks import NODES_ON_ONE_AND_TWO_GPUS
from .network_ranks import FAST, LINK_50, SHUFFLED_50, SLOW_SHUFFLED, NodeGroup, node_group
from .ranks import nan_outputs, random_input
from .test_negative_controls import load_broken
from .test_reductions import check, check_replays, expected_of
from .truth import assert_bitwise, summed

OPERATORS = pytest.mark.parametrize(
    ("operator", "broadcast"), [("gemm_reduce_scatter", "none"), ("gemm_all_reduce", "staged")], ids=["rs", "ar"]
)
#: Devices by node, and how many nodes: on one GPU, 2x1, 3x1, 4x1, 2x2, 3x2 and 2x4.
SHAPES = (((0,) * 2, 2), ((0,) * 3, 3), ((0,) * 4, 4), ((0,) * 4, 2), ((0,) * 6, 3), ((0,) * 8, 2))
LINKS = {"fast": FAST, "slow_shuffled": SLOW_SHUFFLED}


def config_of(
    group: NodeGroup, operator: str, broadcast: str, tile: tuple[int, int] = (128, 256), **others: object
) -> KernelConfig:
    """A configuration for the group's shape."""
    return KernelConfig(
        operator=operator,  # type: ignore[arg-type]
        broadcast=broadcast,  # type: ignore[arg-type]
        network=group.network,  # type: ignore[arg-type]
        block_m=tile[0],
        block_n=tile[1],
        **others,  # type: ignore[arg-type]
    )


@pytest.fixture(
    scope="module",
    params=[(shape, link) for shape in SHAPES for link in LINKS],
    ids=lambda param: f"{param[0][1]}x{len(param[0][0]) // param[0][1]}-{param[1]}",
)
def group(request: pytest.FixtureRequest) -> Iterator[NodeGroup]:
    """One group for all tests of a shape: they share its workspaces, as operators of a model do."""
    (devices, nodes), link = request.param
    with node_group(devices, nodes, LINKS[link]) as made:
        yield made


@OPERATORS
def test_sum_over_nodes(group: NodeGroup, operator: str, broadcast: str) -> None:
    check(group, config_of(group, operator, broadcast), 2048 if group.world % 3 else 3072, 1024, 512)


@OPERATORS
def test_odd_sizes_layouts_and_bias(group: NodeGroup, operator: str, broadcast: str) -> None:
    scatters = operator == "gemm_reduce_scatter"
    for tile, rows, others in (
        ((128, 128), 333, {"has_bias": True, "weight_layout": "kn"}), ((64, 64), 1000, {"dtype": "float16"}),
        ((128, 256), 1, {}),
    ):  # fmt: skip
        config = config_of(group, operator, broadcast, tile, **others)
        check(group, config, rows * group.world if scatters else rows, 520, 264)


@OPERATORS
def test_late_ranks(group: NodeGroup, operator: str, broadcast: str) -> None:
    for late in sorted({0, group.world // 2, group.world - 1}):
        check(
            group, config_of(group, operator, broadcast, (128, 128)), 256 * group.world, 520, 264, epochs=4, late=[late]
        )


def test_shapes_and_operators_alternate(group: NodeGroup) -> None:
    runs = []
    for i in range(6):
        operator, broadcast = ("gemm_reduce_scatter", "none") if i % 2 else ("gemm_all_reduce", "staged")
        config = config_of(group, operator, broadcast, ((128, 256), (64, 64), (128, 128))[i % 3])
        m, n, k = ((64 * group.world, 1024, 264), (16 * group.world, 264, 72), (200 * group.world, 520, 136))[i % 3]
        inputs = [random_input(r, d, m, n, k, config, i, True) for r, d in enumerate(group.devices)]
        outs = nan_outputs(group, m // group.world if operator == "gemm_reduce_scatter" else m, n, config)
        runs.append((config, inputs, outs, group.prepare(config, inputs, outs)))
    group.synchronize()
    for i, (_, _, _, launches) in enumerate(runs):
        group.delay(i % group.world)
        group.run(launches)
    group.synchronize()
    group.check()
    for i, (config, inputs, outs, _) in enumerate(runs):
        truth, _ = summed(inputs, config, "cuda:0")
        for rank, out in enumerate(outs):
            wanted = expected_of(config, rank, group.world, truth)
            assert_bitwise(out.to("cuda:0"), wanted, f"run {i} {config.name} rank {rank}")


@OPERATORS
@pytest.mark.parametrize(("devices", "nodes"), [((0, 0), 2), ((0,) * 4, 2)], ids=["2x1", "2x2"])
def test_rings_smaller_than_the_result(operator: str, broadcast: str, devices: Sequence[int], nodes: int) -> None:
    with node_group(devices, nodes, SLOW_SHUFFLED, arena_bytes=(7 << 20) // 2, max_tiles=8192) as group:
        check(group, config_of(group, operator, broadcast, (64, 64)), 4096, 1024, 264, epochs=4)


def test_rows_in_segments() -> None:
    with node_group((0, 0), 2) as group:
        config = config_of(group, "gemm_reduce_scatter", "none", (128, 128))
        check(group, config, 3 * 2 * 200, 264, 136, segments=3)


@OPERATORS
def test_graph_replays(operator: str, broadcast: str) -> None:
    with node_group((0, 0), 2) as group:
        check_replays(group, config_of(group, operator, broadcast), 512, 520, 264, replays=20)


@OPERATORS
@pytest.mark.parametrize(("devices", "nodes", "missing", "waiting"), [((0, 0), 2, 1, 0), ((0,) * 4, 2, 2, 0)])
def test_a_rail_peer_that_never_launches_is_named(
    operator: str, broadcast: str, devices: Sequence[int], nodes: int, missing: int, waiting: int
) -> None:
    group = NodeGroup(tuple(devices), nodes=nodes, timeout_s=0.5)
    config = config_of(group, operator, broadcast, (128, 128))
    inputs = [random_input(r, d, 1024, 1024, 264, config) for r, d in enumerate(group.devices)]
    rows = 1024 // group.world if operator == "gemm_reduce_scatter" else 1024
    launches = group.prepare(config, inputs, nan_outputs(group, rows, 1024, config))
    group.run(launches, [rank for rank in range(group.world) if rank != missing])
    group.synchronize()
    with pytest.raises(PeerTimeoutError, match="network") as caught:
        group.check_rank(waiting)
    assert (caught.value.report.rank, caught.value.report.peer) == (waiting, missing), str(caught.value)
    for proxy in group.proxies:
        proxy.close(0.5)


def test_a_rail_peer_at_another_launch_is_a_mismatch() -> None:
    group = NodeGroup((0, 0), nodes=2, timeout_s=0.5)
    config = config_of(group, "gemm_reduce_scatter", "none", (128, 128))
    launches = []
    for rank, k in enumerate((264, 136)):
        inputs = [random_input(r, 0, 1024, 1024, k, config) for r in range(2)]
        launches.append(group.prepare(config, inputs, nan_outputs(group, 512, 1024, config))[rank])
    group.run(launches)
    group.synchronize()
    with pytest.raises(LaunchMismatchError, match=r"rank 0 and rank 1|rank 1 and rank 0"):
        group.check()
    for proxy in group.proxies:
        proxy.close(0.5)


def test_a_proxy_that_stops_ends_the_launch() -> None:
    group = NodeGroup((0, 0), nodes=2, timeout_s=5.0)
    config = config_of(group, "gemm_reduce_scatter", "none", (128, 128))
    inputs = [random_input(r, 0, 1024, 1024, 264, config) for r in range(2)]
    launches = group.prepare(config, inputs, nan_outputs(group, 512, 1024, config))
    group.proxies[0].close(0.5)
    group.run(launches, [0])
    group.synchronize()
    with pytest.raises((ProxyUnavailableError, TransportError), match="rank 1"):
        group.check_rank(0)
    group.proxies[1].close(0.5)


@OPERATORS
def test_without_network_waits_missing_chunks_are_noticed(operator: str, broadcast: str) -> None:
    group = NodeGroup((0, 0), nodes=2, timeout_s=2.0)
    config = config_of(group, operator, broadcast, (128, 128))
    # so long a product (half a millisecond) that a late rank's chunks come after its entry; a slow link would not do,
    # since the emulated one copies at once and delays the flag alone
    inputs = [random_input(r, 0, 1024, 1024, 65536, config) for r in range(2)]
    outs = nan_outputs(group, 512 if operator == "gemm_reduce_scatter" else 1024, 1024, config)
    launches = group.prepare(config, inputs, outs, kernels=[load_broken(config, 0, NO_NETWORK_WAIT)] * 2)
    group.synchronize()
    group.delay(1, 20_000_000)
    group.run(launches)
    group.synchronize()
    truth, _ = summed(inputs, config, "cuda:0")
    wanted = expected_of(config, 0, 2, truth)
    assert not torch.allclose(outs[0].float(), wanted, rtol=0.1, atol=1.0), "the check can't tell a missing chunk"
    for proxy in group.proxies:
        proxy.close(0.5)


@OPERATORS
@pytest.mark.parametrize("link", [LINK_50, SHUFFLED_50], ids=["in_order", "shuffled"])
@NODES_ON_ONE_AND_TWO_GPUS
def test_large_products(operator: str, broadcast: str, link: object, devices: Sequence[int], nodes: int) -> None:
    with node_group(devices, nodes, link, arena_bytes=300 << 20) as group:  # type: ignore[arg-type]
        check(group, config_of(group, operator, broadcast), 4096, 4096, 1024, epochs=4)
        for late in range(group.world):
            check(group, config_of(group, operator, broadcast, (128, 128)), 1000 * group.world, 1032, 328, late=[late])
