"""Which groups may launch together: every pair must reach each other, and all ranks must be alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mkcompile.config import settings
from mkcompile.inspect.doctor import software
from mkcompile.plan import disk
from mkcompile.plan.topology import Topology, preset
from mkcompile.runtime import probe
from mkcompile.runtime.exchange import Exchange
from mkcompile.runtime.probe import (
    DeviceFacts,
    compare_facts,
    driver_version,
    kept_topology,
    local_topology,
    obstacle_of_group,
)
from tests.runtime.fakes import lone_group

UUIDS = ("a", "b", "c")


def facts(index: int, **changes: object) -> DeviceFacts:
    one = DeviceFacts(
        host="h",
        uuid=UUIDS[index],
        name="NVIDIA H200",
        capability=(9, 0),
        num_sms=132,
        reachable=UUIDS,
        obstacle="",
        arena_bytes=1 << 30,
        sm_reserve=4,
        queues=32,
    )
    return replace(one, **changes)  # type: ignore[arg-type]


RANKS = (4, 5, 6)


def test_alike_and_joined_ranks_may_launch() -> None:
    assert obstacle_of_group([facts(0), facts(1), facts(2)], RANKS) == ""


def test_facts_survive_the_store() -> None:
    assert DeviceFacts.from_json(facts(1).to_json()) == facts(1)


def test_a_compiler_without_its_library_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The binding looks for it at its first call, and raises an error of its own."""
    binding = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")

    def find() -> None:
        raise RuntimeError("no libnvrtc.so.13")

    monkeypatch.setattr(binding, "nvrtcVersion", find)
    assert all(text in probe._obstacle((9, 0)) for text in ("nvidia-cuda-nvrtc", "no libnvrtc.so.13"))
    assert software.nvrtc().status == "missing"


def test_all_pairs_without_peer_access_are_named() -> None:
    text = obstacle_of_group([facts(0, reachable=("a", "b")), facts(1), facts(2, reachable=("c",))], RANKS)
    assert "4->6, 6->4, 6->5" in text and "CUDA_VISIBLE_DEVICES" in text


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"host": "other"}, "differ in host: rank 4 h, rank 5 other"),
        ({"arena_bytes": 1}, "differ in arena_bytes"),
        ({"num_sms": 114}, "differ in num_sms"),
        ({"name": "NVIDIA H100"}, "differ in name"),
        ({"obstacle": "no NVRTC"}, "rank 5: no NVRTC"),
        ({"uuid": "a"}, "ranks 4, 5 share a GPU"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_ranks_that_differ_run_unfused_and_are_named(change: dict[str, object], expected: str) -> None:
    assert expected in obstacle_of_group([facts(0), facts(1, **change)], RANKS[:2])


@pytest.mark.parametrize(
    ("nodes", "network", "expected"),
    [
        ("xy", "rc", ""),
        ("xy", "", "MKCOMPILE_NETWORK does not name a network"),
        ("xxy", "rc", "different numbers of ranks"),
    ],
    ids=["joined", "no_network", "uneven"],
)
def test_ranks_on_several_nodes_need_a_network_and_not_each_others_memory(
    nodes: str, network: str, expected: str
) -> None:
    alike = {"network": network, "reachable": UUIDS if "xx" in nodes else ()}
    ranks = [facts(i, node=node, host=node, **alike) for i, node in enumerate(nodes)]
    ranks = [replace(one, reachable=(*one.reachable, one.uuid)) for one in ranks]
    text = obstacle_of_group(ranks, RANKS[: len(nodes)])
    assert expected in text and bool(text) == bool(expected)


def test_ranks_of_a_node_must_follow_each_other() -> None:
    ranks = [facts(i % 3, uuid=str(i), reachable=tuple("0123"), node="xyxy"[i], network="rc") for i in range(4)]
    assert "must follow each other" in obstacle_of_group(ranks, range(4))


@pytest.mark.parametrize("network", ["tcp", "srd", "rc"])
def test_proxies_need_queues_of_their_own(network: str) -> None:
    ranks = [facts(i, node=str(i), network=network, queues=(32, 8)[i]) for i in range(2)]
    assert "CUDA_DEVICE_MAX_CONNECTIONS=32, here it is 8" in obstacle_of_group(ranks, RANKS[:2])
    assert obstacle_of_group([replace(one, node="") for one in ranks], RANKS[:2]) == "", "one node needs none"


def test_transports_that_differ_are_named() -> None:
    ranks = [facts(i, node=str(i), network=("rc", "tcp")[i]) for i in range(2)]
    assert "differ in network: rank 4 rc, rank 5 tcp" in obstacle_of_group(ranks, RANKS[:2])


def test_a_group_larger_than_the_peer_table_runs_unfused() -> None:
    assert "at most 16" in obstacle_of_group([facts(0)] * 17, range(17))


def test_a_machine_without_gpus_is_the_cpu_preset() -> None:
    if torch.cuda.device_count() == 0:
        assert local_topology().name == "cpu"
    else:
        assert local_topology().gpu.num_sms == torch.cuda.get_device_properties(0).multi_processor_count


def test_a_fake_group_is_not_waited_for() -> None:
    with lone_group():
        group = dist.group.WORLD
        assert group is not None
        assert "fake" in compare_facts(Exchange(group, "test"), torch.device("cpu")).obstacle


def test_the_driver_is_read_from_the_kernel_modules_own_words(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert driver_version(file) is None
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version 12\n"
    )
    assert driver_version(file) == "580.159.04"


def test_a_topology_is_probed_once_for_each_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "settings", lambda: replace(settings(), cache_dir=tmp_path))
    probed: list[str] = []

    def probe() -> Topology:
        probed.append("once")
        return preset("2xh200")

    assert kept_topology("host a", probe) == kept_topology("host a", probe) == preset("2xh200")
    assert kept_topology("host b", probe) == preset("2xh200") and probed == ["once", "once"]
    monkeypatch.setattr(disk, "settings", lambda: replace(settings(), cache_dir=Path("/proc/no such folder")))
    assert kept_topology("host c", probe) == preset("2xh200"), "a disk that can't be written is no obstacle"
