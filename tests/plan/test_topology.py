"""Topologies: presets, graph, text, disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import networkx as nx
import pytest

from mkcompile.errors import OptionError
from mkcompile.plan import PRESETS, Span, Topology, preset
from mkcompile.plan.disk import load_topology, save_topology, topology_path


@pytest.mark.parametrize("name", PRESETS)
def test_json_round_trip(name: str) -> None:
    topology = replace(PRESETS[name], versions={"driver": "580", "cuda": "13.0"})
    assert Topology.from_json(topology.to_json()) == topology


def test_bad_json_is_an_option_error() -> None:
    for text in ("", "{}", "[1]", '{"name": "x"}'):
        with pytest.raises(OptionError, match="not a topology"):
            Topology.from_json(text)


def test_graph_of_two_nodes_has_gpus_switches_nics_and_rails() -> None:
    graph = PRESETS["2x8xh200"].graph()
    kinds = nx.get_node_attributes(graph, "kind")
    counts = {kind: list(kinds.values()).count(kind) for kind in ("gpu", "switch", "nic", "rail")}
    assert counts == {"gpu": 16, "switch": 2, "nic": 16, "rail": 8}
    assert nx.is_connected(graph)
    assert graph.degree("rail:3") == 2


def test_paths_are_as_wide_as_their_narrowest_edge() -> None:
    two_nodes = PRESETS["2x8xh200"]
    assert two_nodes.path_gbps(0, 7) == 450
    assert two_nodes.path_gbps(0, 8) == 50
    # another rail of another node: by NVLink to the rail's GPU, then across
    assert two_nodes.path_gbps(0, 9) == 50
    with pytest.raises(OptionError, match="no path"):
        PRESETS["2xh200"].path_gbps(0, 2)


def test_spans_fill_nodes_first() -> None:
    two_nodes = PRESETS["2x8xh200"]
    assert two_nodes.span(4) == Span(num_nodes=1, per_node=4)
    assert two_nodes.span(16) == Span(num_nodes=2, per_node=8)
    assert two_nodes.span(16).world_size == 16
    assert PRESETS["gb200nvl72"].span(72).num_nodes == 1


def test_preset_grows_by_nodes_and_unknown_names_list_the_known() -> None:
    assert preset("8xh200", num_nodes=128).num_gpus == 1024
    assert preset("2xh200") is PRESETS["2xh200"]
    with pytest.raises(OptionError, match="2x8xh200"):
        preset("9xh200")
    with pytest.raises(OptionError, match="nic_gbps"):
        replace(PRESETS["2xh200"], num_nodes=2)


def test_key_leaves_versions_out() -> None:
    one = PRESETS["2xh200"]
    assert one.key() == replace(one, versions={"driver": "1"}).key()
    assert one.key() != replace(one, p2p=False).key()


def test_description_says_what_matters() -> None:
    text = replace(PRESETS["2x8xh200"], versions={"driver": "580"}).describe()
    for part in ("16 GPUs", "132 SMs", "450 GB/s", "multicast yes", "8 rails", "580"):
        assert part in text
    assert "peer access NO" in replace(PRESETS["2xh200"], p2p=False).describe()


def test_disk_keeps_a_topology_by_machine(tmp_path: Path) -> None:
    probed = replace(PRESETS["2xh200"], name="probed")
    assert load_topology("host a, driver 1", tmp_path) is None
    save_topology("host a, driver 1", probed, tmp_path)
    assert load_topology("host a, driver 1", tmp_path) == probed
    assert load_topology("host a, driver 2", tmp_path) is None
    topology_path("host a, driver 1", tmp_path).write_text("of another version")
    assert load_topology("host a, driver 1", tmp_path) is None
