"""The launcher where a group spans nodes, on a machine without GPUs or network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

import pytest
import torch
import torch.distributed as dist

from mkcompile.errors import (
    MkcompileError,
    PeerLostError,
    PeerTimeoutError,
    ProxyUnavailableError,
    TransportError,
    TransportReport,
    WaitReport,
    WorkspaceError,
)
from mkcompile.ops.all_gather_gemm import FORM_INPUT, AllGatherGemm
from mkcompile.ops.gemm_all_reduce import GemmAllReduce
from mkcompile.ops.gemm_reduce_scatter import GemmReduceScatter
from mkcompile.runtime import abi
from mkcompile.runtime.exchange import Exchange
from mkcompile.runtime.gather_operation import GatherOperation
from mkcompile.runtime.kernel import LoadedKernel
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.launcher import Launcher
from mkcompile.runtime.machine import own_basis
from mkcompile.runtime.network_link import NetworkLink
from mkcompile.runtime.operation import Operation
from mkcompile.runtime.tactics import Planned
from mkcompile.runtime.workspace import Workspace
from tests.runtime.conftest import PANELS
from tests.runtime.fakes import FakeBlock, FakeDriver, FakePlatform, lone_group

GROUP = "0"


def tensor(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def all_reduce(world: int, m: int = 256) -> GemmAllReduce:
    return GemmAllReduce([tensor(m, 64)], [tensor(512, 64).t()], None, "sum", world, GROUP, "key")


def reduce_scatter(world: int) -> GemmReduceScatter:
    return GemmReduceScatter([tensor(256, 64)], [tensor(512, 64).t()], None, (256, 512), 0, "sum", world, GROUP, "key")


def gather(world: int, dim: int = 0) -> AllGatherGemm:
    return AllGatherGemm(tensor(128, 64), [tensor(512, 64).t()], [None], [FORM_INPUT], dim, True, world, GROUP, "key")


@pytest.fixture(params=[(0, 1), (0, 0, 1, 1)], ids=["2x1", "2x2"])
def nodes(request: pytest.FixtureRequest, fake_driver: FakeDriver) -> Iterator[tuple[Launcher, FakePlatform]]:
    """A launcher whose group lies on two nodes."""
    platform = FakePlatform(world_size=len(request.param))
    platform.nodes = request.param
    with lone_group(len(request.param)):
        yield Launcher(platform, Planned(own_basis, available=PANELS)), platform


def world_of(platform: FakePlatform) -> int:
    return len(platform.nodes)


def operation_of(launcher: Launcher) -> Operation | GatherOperation:
    operation = list(launcher._operations.values())[-1]
    assert isinstance(operation, (Operation, GatherOperation))
    return operation


def test_reductions_take_the_kernels_over_nodes(nodes: tuple[Launcher, FakePlatform], fake_driver: FakeDriver) -> None:
    launcher, platform = nodes
    world = world_of(platform)
    for call in (all_reduce(world), reduce_scatter(world)):
        out = launcher(call)
        assert out is not None
        config = platform.loaded[-1]
        assert config.network == ("flat" if world == 2 else "hierarchical")
        assert config.broadcast == ("staged" if isinstance(call, GemmAllReduce) else "none")
        block = fake_driver.launches[-1]
        assert (block.rank, block.world) == (0, world // 2), "ranks of a node"
        assert list(block.workspace[: world // 2]) == [(rank + 1) << 40 for rank in range(world // 2)]
        workspace = operation_of(launcher).group.workspace
        peers = workspace.peers(workspace.current)  # type: ignore[arg-type]
        assert peers.layout.nodes == 2 and peers.network is not None and peers.network.capacity == 1024
        assert peers.group == tuple(range(world // 2))


def test_a_gather_is_two_kernels_with_sms_of_their_own(
    nodes: tuple[Launcher, FakePlatform], fake_driver: FakeDriver
) -> None:
    launcher, platform = nodes
    outs = launcher(gather(world_of(platform)))
    assert outs is not None and [tuple(out.shape) for out in outs] == [
        (128 * world_of(platform), 512),
        (128 * world_of(platform), 64),
    ]
    move, multiply = fake_driver.grids[-2:]
    assert platform.loaded[-1].network != "none" and move + multiply <= 128
    launcher(gather(world_of(platform)))
    assert len(platform.loaded) == 1 and len(fake_driver.grids) == 4


@pytest.mark.parametrize("calls_driver", [True, False])
@pytest.mark.parametrize("make", [all_reduce, reduce_scatter, gather])
def test_a_launch_that_waits_for_a_proxy_that_calls_the_driver_ends_before_its_caller_goes_on(
    nodes: tuple[Launcher, FakePlatform], make: Callable[[int], GemmAllReduce], calls_driver: bool
) -> None:
    launcher, platform = nodes
    platform.proxy_calls_driver = calls_driver
    launcher(make(world_of(platform)))
    before = platform.backing_of_group.settled
    given = make(world_of(platform))
    for call in (given, given, make(world_of(platform))):
        launcher(call)
    assert platform.backing_of_group.settled == before + 3 * calls_driver


@pytest.mark.parametrize("calls_driver", [True, False])
@pytest.mark.parametrize("make", [all_reduce, gather])
def test_what_waits_for_a_proxy_that_calls_the_driver_ends_before_a_new_signature_loads_its_kernel(
    nodes: tuple[Launcher, FakePlatform],
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[int], GemmAllReduce],
    calls_driver: bool,
) -> None:
    launcher, platform = nodes
    platform.proxy_calls_driver = calls_driver
    launcher(reduce_scatter(world_of(platform)))
    load, at_load = platform.load, list[int]()
    before = platform.backing_of_group.settled

    def noted(config: KernelConfig, device: torch.device) -> LoadedKernel:
        at_load.append(platform.backing_of_group.settled)
        return load(config, device)

    monkeypatch.setattr(platform, "load", noted)
    launcher(make(world_of(platform)))
    assert at_load == [before + calls_driver]


@pytest.mark.parametrize("calls_driver", [True, False])
@pytest.mark.parametrize("nodes_of_other", [(0, 1), (0, 0)], ids=["over nodes", "one node"])
def test_replays_of_another_group_that_wait_for_such_a_proxy_end_before_a_workspace_is_made(
    fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, nodes_of_other: tuple[int, ...], calls_driver: bool
) -> None:
    platform = FakePlatform()
    backing, platform.nodes, platform.proxy_calls_driver = platform.backing_of_group, (0, 1), calls_driver
    allocate, when_asked = backing.allocate, list[int]()

    def noted(size_bytes: int, zeroed_bytes: int) -> torch.Tensor | FakeBlock:
        when_asked.append(backing.settled)
        return allocate(size_bytes, zeroed_bytes)

    with lone_group():
        launcher = Launcher(platform, Planned(own_basis, available=PANELS))
        launcher(all_reduce(2))
        platform.nodes, other = nodes_of_other, dist.new_group([0, 1]).group_name
        monkeypatch.setattr(backing, "allocate", noted)
        call = replace(all_reduce(2), group=other)
        before = backing.settled
        launcher(call)
        assert (when_asked[0] > before) is calls_driver, "a new group's"
        platform.report(1, op=2, rank=0, peer=1, role=2, code=abi.PEER_TIMEOUT)
        with pytest.raises(PeerTimeoutError):
            launcher(call)
        before = backing.settled
        launcher(call)
        assert len(when_asked) == 2 and (when_asked[1] > before) is calls_driver, "one in the place of a failed one"


class Closing(Workspace):
    """Another thread closes the link when it has been read once."""

    links: list[NetworkLink | None]

    @property
    def link(self) -> NetworkLink | None:
        return self.links.pop(0)

    @link.setter
    def link(self, link: NetworkLink | None) -> None:
        self.links = [link, None]


def test_any_thread_may_ask_what_is_held_while_a_link_is_closed(nodes: tuple[Launcher, FakePlatform]) -> None:
    launcher, platform = nodes
    launcher(all_reduce(world_of(platform)))
    current = operation_of(launcher).group.workspace.current
    assert current is not None
    closing = Closing(**{one.name: getattr(current, one.name) for one in fields(current)})
    assert closing.is_held
    assert not Closing(**{one.name: getattr(current, one.name) for one in fields(current)} | {"link": None}).is_held


def test_no_launch_of_one_node_is_waited_for(fake_driver: FakeDriver) -> None:
    platform = FakePlatform()
    with lone_group():
        Launcher(platform, Planned(own_basis, available=PANELS))(all_reduce(2))
    assert fake_driver.launches and not platform.backing_of_group.settled


def test_columns_that_are_gathered_over_nodes_are_left_to_the_reference(nodes: tuple[Launcher, FakePlatform]) -> None:
    launcher, platform = nodes
    assert launcher(gather(world_of(platform), dim=1)) is None and not platform.loaded


def test_a_network_that_can_not_be_had_leaves_the_group_unfused(
    nodes: tuple[Launcher, FakePlatform], caplog: pytest.LogCaptureFixture
) -> None:
    launcher, platform = nodes
    platform.link_failure = TransportError(report())
    assert launcher(all_reduce(world_of(platform))) is None
    assert "run unfused" in caplog.text and "ibv_open_device" in caplog.text
    platform.link_failure = None
    assert launcher(all_reduce(world_of(platform))) is None, "decided once, alike on all ranks"


def test_a_workspace_that_grows_gets_a_link_of_its_own(nodes: tuple[Launcher, FakePlatform]) -> None:
    launcher, platform = nodes
    launcher(all_reduce(world_of(platform)))
    before = platform.backing_of_group.allocated_bytes[-1]
    launcher(all_reduce(world_of(platform), m=65536))
    assert platform.backing_of_group.allocated_bytes[-1] > before
    assert platform.closed_links[-1] == before


@pytest.mark.parametrize("lacks", ["memory", "network"])
def test_a_workspace_that_can_not_be_made_gives_its_place_for_reports_back(
    nodes: tuple[Launcher, FakePlatform], lacks: str
) -> None:
    launcher, platform = nodes
    launcher(all_reduce(world_of(platform)))
    if lacks == "memory":
        platform.backing_of_group.allocation_failure = "none left"
    else:
        platform.link_failure = TransportError(report())
    with pytest.raises((WorkspaceError, TransportError)):
        launcher(all_reduce(world_of(platform), m=65536))
    board = launcher._resources.board
    assert board is not None and len(board._slots) == 1


def grown(
    nodes: tuple[Launcher, FakePlatform], monkeypatch: pytest.MonkeyPatch, peer: Callable[[str, str], str]
) -> list[str]:
    """What a growing workspace does with the one before. `peer`: what the other ranks say, of a step and what this one
    says.
    """
    launcher, platform = nodes
    log, world = platform.backing_of_group.log, world_of(platform)

    def gather(exchange: Exchange, step: str, value: str) -> tuple[str, ...]:
        log.append(step.rpartition(": ")[2])
        return value, *(peer(step, value) for _ in range(world - 1))

    launcher(all_reduce(world))
    monkeypatch.setattr(Exchange, "gather", gather)
    launcher(all_reduce(world, m=65536))
    return log[log.index("connected") + 1 :]


def test_memory_is_freed_when_no_rank_uses_or_maps_it(
    nodes: tuple[Launcher, FakePlatform], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = grown(nodes, monkeypatch, lambda step, value: value)
    before = nodes[1].backing_of_group.allocated_bytes[0]
    ended, unmapped = "launches before it have ended", "the one before it is unmapped"
    assert [one for one in log if one != "settle"] == [ended, "unmap", unmapped, f"free {before}"]
    assert log.index("settle") < log.index(ended) and nodes[1].closed_links == [before]


def test_what_a_graph_of_another_rank_uses_is_kept(
    nodes: tuple[Launcher, FakePlatform], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = grown(nodes, monkeypatch, lambda step, value: "captured" if step.endswith("ended") else value)
    launcher, platform = nodes
    assert "unmap" not in log and not platform.closed_links
    assert launcher.held_bytes() == sum(platform.backing_of_group.allocated_bytes)


def test_what_a_rank_that_does_not_come_may_use_is_kept(
    nodes: tuple[Launcher, FakePlatform], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(step: str, value: str) -> str:
        if step.endswith("ended"):
            raise missing(step)
        return value

    with pytest.raises(PeerTimeoutError):
        grown(nodes, monkeypatch, absent)
    assert len(nodes[1].backing_of_group.held) == 2 and "unmap" not in nodes[1].backing_of_group.log


def test_who_is_missing_on_another_node_is_named(nodes: tuple[Launcher, FakePlatform]) -> None:
    launcher, platform = nodes
    world = world_of(platform)
    launcher(all_reduce(world))
    role = abi.ROLES.index("network receive")
    platform.report(0, op=2, rank=0, peer=1, role=role, tile=3, code=abi.PEER_TIMEOUT)
    with pytest.raises(PeerTimeoutError) as caught:
        launcher(all_reduce(world))
    assert caught.value.report.peer == world // 2, "the rail peer on node 1"
    assert "proxy has taken 3 commands" in caught.value.__notes__[0], "and what the proxy did meanwhile"


def test_a_proxy_that_is_closed_meanwhile_does_not_hide_who_was_waited_for(
    nodes: tuple[Launcher, FakePlatform], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, platform = nodes
    monkeypatch.setattr(platform, "counters_of_proxy", closed_proxy)
    launcher(all_reduce(world_of(platform)))
    platform.report(0, op=2, rank=0, peer=1, role=abi.ROLES.index("network receive"), code=abi.PEER_TIMEOUT)
    with pytest.raises(PeerTimeoutError) as caught:
        launcher(all_reduce(world_of(platform)))
    assert "has been closed" in caught.value.__notes__[0]


def closed_proxy() -> dict[str, int]:
    raise MkcompileError("this proxy has been closed")


@pytest.mark.parametrize("knows", [True, False])
def test_a_proxy_that_stopped_says_why(nodes: tuple[Launcher, FakePlatform], knows: bool) -> None:
    launcher, platform = nodes
    launcher(all_reduce(world_of(platform)))
    platform.proxy_failure = PeerLostError(replace(report(), peer=1)) if knows else None
    platform.report(0, op=2, rank=0, peer=1, role=abi.ROLES.index("network entry"), code=abi.NETWORK_FAULT)
    with pytest.raises(PeerLostError if knows else ProxyUnavailableError):
        launcher(all_reduce(world_of(platform)))
    platform.proxy_failure = None
    assert launcher(all_reduce(world_of(platform))) is not None, "a new workspace with a new link"


@pytest.mark.parametrize("knows", [True, False])
def test_what_ended_a_proxy_is_known_after_its_group_has_ended(
    nodes: tuple[Launcher, FakePlatform], monkeypatch: pytest.MonkeyPatch, knows: bool
) -> None:
    launcher, platform = nodes
    world = world_of(platform)
    ending, other = dist.new_group(list(range(world))), dist.new_group(list(range(world)))
    launcher(replace(all_reduce(world), group=ending.group_name))

    def wait_for_the_kernel() -> None:
        platform.proxy_failure = PeerLostError(replace(report(), peer=1)) if knows else None
        platform.report(0, op=2, rank=0, peer=1, role=abi.ROLES.index("network entry"), code=abi.NETWORK_FAULT)

    monkeypatch.setattr(platform.backing_of_group, "settle", wait_for_the_kernel)
    dist.destroy_process_group(ending)
    launcher(replace(all_reduce(world), group=other.group_name))
    assert len(platform.closed_links) == 1
    with pytest.raises(PeerLostError if knows else ProxyUnavailableError):
        launcher.check()


@pytest.mark.parametrize("knows", [True, False])
def test_what_ended_a_proxy_is_known_where_a_rank_does_not_come_to_unmap(
    nodes: tuple[Launcher, FakePlatform], monkeypatch: pytest.MonkeyPatch, knows: bool
) -> None:
    launcher, platform = nodes

    def absent(step: str, value: str) -> str:
        if step.endswith("unmapped"):
            platform.report(0, op=2, rank=0, peer=1, role=abi.ROLES.index("network entry"), code=abi.NETWORK_FAULT)
            raise missing(step)
        platform.proxy_failure = PeerLostError(replace(report(), peer=1)) if knows else None
        return value

    with pytest.raises(PeerTimeoutError):
        grown(nodes, monkeypatch, absent)
    with pytest.raises(PeerLostError if knows else ProxyUnavailableError):
        launcher.check()


def report() -> TransportReport:
    return TransportReport(call="ibv_open_device", device="mlx5_0", peer=-1, errno=19, detail="")


def missing(step: str) -> PeerTimeoutError:
    return PeerTimeoutError(WaitReport(operator=step, rank=0, peer=1, role="", tile=-1, expected=1, seen=0, waited_s=1))
