"""torch.compile over two nodes: the operators' chunks go through our own proxy over `tcp`, ATen multiplies and adds.

Two network namespaces on this machine are the nodes; where none can be made the ranks meet over loopback.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from tests.host import network_rank
from tests.host.namespaces import LINK, refusal, two_nodes
from tests.host.network_rank import LIMIT_S, WORLD_SIZE, Where
from tests.spawn import Outcomes, run_cases

# Slots of 8 KiB, so that small products take several rounds.
ENVIRONMENT = {"MKCOMPILE_NETWORK": "tcp", "MKCOMPILE_ARENA_BYTES": str(1 << 20)}
ALWAYS = ("compiled", "calls", "rounded", "uneven")


@pytest.fixture(scope="module")
def why_not() -> str:
    """Why there are no namespaces; empty where there are."""
    return refusal()


@pytest.fixture(scope="module")
def outcomes(why_not: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    folder = str(tmp_path_factory.mktemp("nodes"))
    if why_not:
        warnings.warn(f"no network namespaces here ({why_not}): the ranks meet over loopback", stacklevel=1)
        yield run(Where(folder=folder), (*ALWAYS, "killed"))
        return
    with two_nodes() as nodes:
        yield run(Where(folder=folder, names=nodes.names, link=LINK), (*ALWAYS, "flap", "killed"))


def run(where: Where, names: tuple[str, ...]) -> Outcomes:
    cases = {name: partial(getattr(network_rank, f"{name}_case"), where=where) for name in names}
    return run_cases(cases, WORLD_SIZE, environment=ENVIRONMENT, init_group=False, one_group=True)


def test_a_compiled_model_gives_the_bits_of_the_eager_one(outcomes: Outcomes, why_not: str) -> None:
    for seen in outcomes.values("compiled"):
        assert seen["equal"] and all(seen["equal"])
        assert seen["placement"] == seen["planned"] == "2x2"
        assert seen["device"] in (("lo",) if why_not else (LINK, "lo"))
        assert set(seen["sites"]) == {"all_gather_gemm", "gemm_all_reduce", "gemm_reduce_scatter"}
        assert len(seen["sites"]) == 6, "forward and backward"


def test_every_shape_is_right_on_every_arrangement_of_nodes(outcomes: Outcomes) -> None:
    by_rank = outcomes.values("calls")
    assert [set(seen) for seen in by_rank] == [{"2x2", "2x1", "3x1", "4x1"}] * 2 + [
        {"2x2", "3x1", "4x1"},
        {"2x2", "4x1"},
    ]
    for seen in by_rank:
        for name, right in seen.items():
            assert len(right) >= 24 and all(right), (name, right)


def test_the_network_carries_what_the_hierarchy_leaves(outcomes: Outcomes) -> None:
    """Of a step's tensors a rank sends its rail peer one half at most, as partials or as shards."""
    for seen in outcomes.values("compiled"):
        counters = seen["counters"]
        assert counters["arrivals"] > 0 and counters["bytes_sent"] > 0
        rows, width, steps, sites = 8, 24, 3, 6
        whole = rows * width * 4
        assert counters["bytes_sent"] <= steps * sites * whole


def test_all_ranks_have_the_same_bits_run_after_run(outcomes: Outcomes) -> None:
    results = outcomes.values("rounded")
    first = results[0][0]
    for one, again, truth in results:
        assert torch.equal(one, first) and torch.equal(again, first)
        # a rank's partial, a node's and the sum are rounded once each
        scale = truth.abs().max()
        assert (one.double() - truth).abs().max() <= 3 * 2**-8 * scale


def test_uneven_nodes_are_left_to_the_reference(outcomes: Outcomes) -> None:
    for result, obstacle in outcomes.values("uneven"):
        assert result is None and "3+1" in obstacle


def test_a_link_that_goes_down_is_a_lost_peer_and_the_unfused_path_goes_on(outcomes: Outcomes, why_not: str) -> None:
    if why_not:
        pytest.skip(f"no network namespaces here: {why_not}")
    everyone = outcomes.values("flap")
    assert "PeerLostError" in {seen["error"] for seen in everyone} <= {"PeerLostError", "PeerTimeoutError"}
    for seen in everyone:
        assert seen["took_s"] < 3 * LIMIT_S
        assert seen["equal"] and all(seen["equal"]) and seen["obstacle"]


def test_a_killed_rank_is_a_lost_peer_and_the_process_goes_on(outcomes: Outcomes) -> None:
    survivors = [outcomes.by_case["killed"][rank] for rank in range(3)]
    for one in survivors:
        assert one.error is None, one.error
        assert one.value["took_s"] < 10 and one.value["works"] and one.value["later"] is None
    # whoever notices second may see the first survivor go
    assert 3 in {one.value["peer"] for one in survivors} and -1 not in {one.value["peer"] for one in survivors}
