"""How groups lie on nodes: any order of ranks, axes of meshes, uneven nodes; and what the planner makes of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from mkcompile.plan import PRESETS, Policy, Refusal, Span, decide, preset
from mkcompile.plan.decide import best_candidate
from mkcompile.plan.exchange import Ranks
from mkcompile.plan.placement import Placement, placed
from mkcompile.plan.publish import hear, say
from mkcompile.plan.table import PlanTable
from mkcompile.runtime.published import Basis
from tests.plan.problems import problem

LARGE = problem("gemm_reduce_scatter", 16384, 8192, 4096, world_size=4)


@pytest.mark.parametrize(
    ("names", "nodes", "span", "even"),
    [
        ("aaaa", (0, 0, 0, 0), (1, 4), True),
        ("aabb", (0, 0, 1, 1), (2, 2), True),
        ("abab", (0, 1, 0, 1), (2, 2), True),
        ("baab", (0, 1, 1, 0), (2, 2), True),
        ("abcd", (0, 1, 2, 3), (4, 1), True),
        ("aaab", (0, 0, 0, 1), (2, 3), False),
        ("aabc", (0, 0, 1, 2), (3, 2), False),
    ],
)
def test_a_group_is_classified_by_the_names_of_its_nodes(
    names: str, nodes: tuple[int, ...], span: tuple[int, int], even: bool
) -> None:
    found = Placement.of(names)
    assert found.nodes == nodes and found.is_even is even
    assert found.span == Span(num_nodes=span[0], per_node=span[1])
    assert found.is_node_major is (list(nodes) == sorted(nodes))


@pytest.mark.parametrize("names", ["aabb", "abab", "abba", "cabbca", "abcabcabc"])
def test_rail_peers_have_one_place_on_every_node(names: str) -> None:
    found = Placement.of(names)
    seen = set()
    for node, rail in product(range(found.num_nodes), range(found.per_node)):
        rank = found.rank_at(node, rail)
        assert (found.nodes[rank], found.rail_of(rank)) == (node, rail)
        seen.add(rank)
    assert seen == set(range(found.world_size))
    assert all(list(found.members(node)) == sorted(found.members(node)) for node in range(found.num_nodes))


def test_nodes_are_numbered_without_gaps() -> None:
    with pytest.raises(ValueError, match="without gaps"):
        Placement(nodes=(0, 2))
    with pytest.raises(ValueError, match="without gaps"):
        Placement(nodes=())


def axes(shape: tuple[int, ...], per_node: int, order: list[int]) -> list[set[str]]:
    """For each axis of a mesh over ranks in this order: how its groups lie, where ranks fill nodes of `per_node`."""
    strides = [1] * len(shape)
    for axis in reversed(range(len(shape) - 1)):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    found = []
    for axis, size in enumerate(shape):
        others = [range(one) if i != axis else range(1) for i, one in enumerate(shape)]
        starts = [sum(i * stride for i, stride in zip(place, strides, strict=True)) for place in product(*others)]
        groups = [[order[start + i * strides[axis]] for i in range(size)] for start in starts]
        found.append({str(Placement.of([rank // per_node for rank in group])) for group in groups})
    return found


@pytest.mark.parametrize(
    ("shape", "per_node", "order", "lies"),
    [
        ((2, 8), 8, range(16), [{"2x1"}, {"1x8"}]),
        ((8, 2), 8, range(16), [{"2x4"}, {"1x2"}]),
        ((1, 16), 8, range(16), [{"1x1"}, {"2x8"}]),
        ((2, 8), 8, [rank % 2 * 8 + rank // 2 for rank in range(16)], [{"1x2"}, {"2x4"}]),
        ((2, 2, 4), 8, range(16), [{"2x1"}, {"1x2"}, {"1x4"}]),
        ((4, 2, 4), 8, range(32), [{"4x1"}, {"1x2"}, {"1x4"}]),
        ((2, 4, 4), 8, range(32), [{"2x1"}, {"2x2"}, {"1x4"}]),
        ((2, 6), 8, range(12), [{"1x2", "2x1"}, {"1x6", "2+4"}]),
    ],
)
def test_axes_of_meshes_lie_inside_a_node_across_nodes_or_both(
    shape: tuple[int, ...], per_node: int, order: list[int], lies: list[set[str]]
) -> None:
    assert axes(shape, per_node, list(order)) == lies


def test_the_planner_takes_the_group_as_it_lies() -> None:
    """Four of eight GPUs: inside one node NVLink alone, two by two both, one by one the network alone."""
    machine = PRESETS["2x8xh200"]
    inside, both, across = (decide(placed(LARGE, Placement.of(names)), machine) for names in ("aaaa", "aabb", "abcd"))
    assert inside.plan.transport == "store" and both.plan.transport == "store+network"
    assert inside.unfused_s < both.unfused_s < across.unfused_s
    assert inside.ceiling_s <= both.ceiling_s < across.ceiling_s
    assert decide(LARGE, machine) == replace(inside, problem=LARGE)


def test_a_group_of_more_ranks_on_one_node_than_on_another_is_refused() -> None:
    uneven = decide(placed(LARGE, Placement.of("aaab")), PRESETS["2x8xh200"])
    assert uneven.refusal is Refusal.UNEVEN_NODES and "4 ranks on 2 nodes" in uneven.detail
    spilling = decide(replace(LARGE, world_size=12, m=12 * 1024), PRESETS["2x8xh200"])
    assert spilling.refusal is Refusal.UNEVEN_NODES


def test_a_machine_without_a_known_network_is_given_one_where_a_group_needs_it() -> None:
    pair = replace(LARGE, world_size=2)
    found = decide(placed(pair, Placement.of("ab")), PRESETS["2xh200"])
    assert found.fused_s is not None and found.ceiling_s > decide(pair, PRESETS["2xh200"]).ceiling_s
    assert best_candidate(found.problem, PRESETS["2xh200"], Policy()) is not None
    assert PlanTable(topology=PRESETS["2xh200"]).launch(found.problem).world_size == 2
    assert preset("2xh200").reaching(1) is preset("2xh200")


def test_without_a_kernel_for_networks_the_refusal_says_so() -> None:
    inside_only = Policy(available=frozenset({"gemm_reduce_scatter/none"}))
    across = decide(placed(LARGE, Placement.of("aabb")), PRESETS["2x8xh200"], inside_only)
    assert across.refusal is Refusal.NO_NETWORK_KERNEL


def test_a_problem_inside_a_node_keeps_its_key() -> None:
    assert placed(LARGE, Placement.of("aaaa")) is LARGE and "num_nodes" not in LARGE.key()
    keys = {placed(LARGE, Placement.of(names)).key() for names in ("aaaa", "aabb", "abab", "abcd", "aaab")}
    assert len(keys) == 4, "equal where the group lies alike"


class Memory:
    """A store of one process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def wait(self, keys: list[str], timeout: object) -> None:
        assert all(key in self.values for key in keys)


def test_all_ranks_hear_rank_0s_machine_and_everybodys_node() -> None:
    store = Memory()
    ranks = [Ranks(rank=rank, world_size=4, store=store) for rank in range(4)]

    def own() -> Basis:
        return Basis(topology=PRESETS["2xh200"])

    said = [say(one, node, own) for one, node in zip(ranks, ("left", "right", "left", "right"), strict=True)]
    told = [hear(one, text) for one, text in zip(ranks, said, strict=True)]
    assert {one.placement.nodes for one in told} == {(0, 1, 0, 1)}
    assert {(one.topology.num_nodes, one.topology.nic_gbps) for one in told} == {(2, 50.0)}


def test_without_a_transport_a_group_that_spans_nodes_is_refused() -> None:
    machine = preset("2x8xh200")
    over_nodes = replace(LARGE, num_nodes=2, per_node=2)
    assert decide(over_nodes, machine).refusal is None
    refused = decide(over_nodes, replace(machine, transport=""))
    assert refused.refusal is Refusal.NO_NETWORK_KERNEL and "MKCOMPILE_NETWORK" in refused.detail
    assert decide(LARGE, replace(machine, transport="")).refusal is None, "one node needs none"
