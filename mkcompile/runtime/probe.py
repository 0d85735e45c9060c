"""What there is to run on: each rank's device and reach, which the ranks of a group tell each other; and a `Topology`.

Facts come from torch alone. A group gets fused kernels only where every pair of its GPUs can reach each other, all have
the right architecture and a compiler, and all ranks have the same settings: the answer is the same on every rank.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from mkcompile.config import foreign_settings, settings
from mkcompile.errors import UnsupportedDeviceError
from mkcompile.plan.disk import load_topology, save_topology
from mkcompile.plan.placement import Placement
from mkcompile.plan.topology import GB200, H200, Gpu, Topology, preset
from mkcompile.runtime import driver, nvrtc, sources
from mkcompile.runtime.abi import MAX_NODES, MAX_WORLD
from mkcompile.runtime.exchange import Exchange
from mkcompile.runtime.network_choice import QUEUES_FOR_PROXIES, has_queues, transport_of_kernels
from mkcompile.runtime.node import node_name

_LOG = logging.getLogger(__name__)
# One NVLink of the fourth generation, a direction; 18 of them join two H200. PCIe: of the fifth, 16 lanes, about.
_NVLINK_GBPS, _DEFAULT_GBPS, _PCIE_GBPS = 25.0, 450.0, 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """One rank's device. `reachable`: the devices whose memory it can map, itself included, by uuid.

    `obstacle`: why this rank can't run fused kernels; empty if it can. `network`: what carries their data to other
    nodes; empty: nothing. `queues`: of the device, for all of its streams. Units: `arena_bytes` bytes.
    """

    host: str
    uuid: str
    name: str
    capability: tuple[int, int]
    num_sms: int
    reachable: tuple[str, ...]
    obstacle: str
    arena_bytes: int
    sm_reserve: int
    node: str = ""
    network: str = ""
    queues: int = 0

    def to_json(self) -> str:
        """One line; `from_json` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> DeviceFacts:
        """The facts that `to_json` wrote."""
        values = json.loads(text)
        lists = {name: tuple(values[name]) for name in ("capability", "reachable")}
        return cls(**{**values, **lists})


def device_facts(device: torch.device) -> DeviceFacts:
    """What this process sees of its device. Makes no context on any other device."""
    properties = torch.cuda.get_device_properties(device)
    assert device.index is not None
    seen = range(torch.cuda.device_count())
    reachable = [
        str(torch.cuda.get_device_properties(peer).uuid)
        for peer in seen
        if peer == device.index or torch.cuda.can_device_access_peer(device.index, peer)
    ]
    return DeviceFacts(
        host=socket.gethostname(),
        uuid=str(properties.uuid),
        name=properties.name,
        capability=(properties.major, properties.minor),
        num_sms=properties.multi_processor_count,
        reachable=tuple(reachable),
        obstacle=_obstacle((properties.major, properties.minor)),
        arena_bytes=settings().arena_bytes,
        sm_reserve=settings().sm_reserve,
        node=node_name(),
        network=transport_of_kernels(),
        queues=foreign_settings().device_queues,
    )


def _obstacle(capability: tuple[int, int]) -> str:
    if not settings().kernels:
        return "MKCOMPILE_KERNELS=0"
    try:
        driver.require_hopper(capability)
        nvrtc.version()
    except UnsupportedDeviceError as error:
        return str(error)
    return ""


def obstacle_of_group(facts: Sequence[DeviceFacts], ranks: Sequence[int]) -> str:
    """Why these ranks can't run a fused kernel together; empty if they can. Shows all pairs, not the first bad one."""
    if len(facts) > MAX_WORLD:
        return f"{len(facts)} ranks; fused kernels reach at most {MAX_WORLD}"
    own = [f"rank {rank}: {one.obstacle}" for rank, one in zip(ranks, facts, strict=True) if one.obstacle]
    if own:
        return "; ".join(own)
    placement = Placement.of([one.node for one in facts])
    across = placement.num_nodes > 1
    for name in (*(("network",) if across else ("host",)), "name", "num_sms", "arena_bytes", "sm_reserve"):
        values = {getattr(one, name) for one in facts}
        if len(values) > 1:
            each = ", ".join(f"rank {rank} {getattr(one, name)}" for rank, one in zip(ranks, facts, strict=True))
            return f"the ranks differ in {name}: {each}"
    shared = {one.uuid for one in facts if [other.uuid for other in facts].count(one.uuid) > 1}
    if shared:
        users = [str(rank) for rank, one in zip(ranks, facts, strict=True) if one.uuid in shared]
        return f"ranks {', '.join(users)} share a GPU; give each rank its own"
    fewest = min(one.queues for one in facts)
    return (_obstacle_across(placement, facts[0].network, fewest) if across else "") or _unreachable_pairs(facts, ranks)


def _obstacle_across(placement: Placement, network: str, queues: int) -> str:
    """Why kernels can't join ranks on several nodes. `queues`: of the device that has fewest."""
    if not placement.is_even:
        return f"its nodes have different numbers of ranks ({placement})"
    if not placement.is_node_major:
        return f"the ranks of a node must follow each other; the nodes of its ranks are {placement.nodes}"
    if placement.num_nodes > MAX_NODES:
        return f"{placement.num_nodes} nodes; fused kernels reach at most {MAX_NODES}"
    if not network:
        return f"it spans {placement.num_nodes} nodes, and MKCOMPILE_NETWORK does not name a network (rc, srd, tcp)"
    if not has_queues(network, queues):
        return (
            f"the proxy of {network} may copy in streams, which must not share a queue of the GPU with kernels: set "
            f"CUDA_DEVICE_MAX_CONNECTIONS={QUEUES_FOR_PROXIES}, here it is {queues}"
        )
    return ""


def _unreachable_pairs(facts: Sequence[DeviceFacts], ranks: Sequence[int]) -> str:
    pairs = [
        f"{rank}->{peer}"
        for rank, one in zip(ranks, facts, strict=True)
        for peer, other in zip(ranks, facts, strict=True)
        if other.node == one.node and other.uuid not in one.reachable
    ]
    if not pairs:
        return ""
    return (
        f"no peer access between the GPUs of ranks {', '.join(pairs)}; each rank must see all GPUs "
        "(one CUDA_VISIBLE_DEVICES for all) and they must be joined by NVLink or allow peer-to-peer over PCIe"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What the ranks of a group have found out together: why they can't run a fused kernel (empty if they can), on
    which nodes they are, and what carries data between those.
    """

    obstacle: str
    placement: Placement
    network: str = ""


def compare_facts(exchange: Exchange, device: torch.device) -> Survey:
    """Collective: the ranks' facts, and what follows from them.

    Raises: PeerTimeoutError for ranks that do not come.
    """
    group = exchange.group()
    if group is not None and dist.get_backend(group) == "fake":
        alone = Placement(nodes=(0,) * exchange.world_size)
        return Survey(obstacle="the group is a fake one: its other ranks do not exist", placement=alone)
    facts = [DeviceFacts.from_json(text) for text in exchange.gather("devices", device_facts(device).to_json())]
    return Survey(
        obstacle=obstacle_of_group(facts, exchange.ranks),
        placement=Placement.of([one.node for one in facts]),
        network=facts[0].network,
    )


def local_topology() -> Topology:
    """This host as one node, from the devices that this process sees; the preset `cpu` where there are none.

    Kept on disk, by host, devices and versions. A GPU that the planner does not know gets an H200's rates by its number
    of SMs.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return preset("cpu")
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]
    versions = _versions()
    return kept_topology(json.dumps([socket.gethostname(), uuids, versions]), lambda: _probed(count, versions))


def kept_topology(machine: str, probe: Callable[[], Topology]) -> Topology:
    """What is on disk for this machine, else what is probed, which is kept where there is room for it."""
    known = load_topology(machine)
    if known is not None:
        return known
    probed = probe()
    try:
        save_topology(machine, probed)
    except OSError as error:
        _LOG.warning("the topology is probed again by each process: %s", error)
    return probed


def _versions() -> dict[str, str]:
    """What measurements depend on."""
    return {
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "driver": driver_version() or "unknown",
        "kernels": sources.digest(),
    }


def _probed(count: int, versions: Mapping[str, str]) -> Topology:
    properties = torch.cuda.get_device_properties(0)
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    return Topology(
        name=f"{count}x{properties.name.replace('NVIDIA ', '').lower()}",
        gpu=_gpu(properties.name, (properties.major, properties.minor), properties.multi_processor_count),
        gpus_per_node=count,
        nvlink_gbps=_link_gbps(pairs),
        p2p=all(torch.cuda.can_device_access_peer(one, other) for one, other in pairs),
        multicast=False,
        versions=versions,
    )


def _link_gbps(pairs: Sequence[tuple[int, int]]) -> float:
    """Of the narrowest pair, by its number of NVLinks; PCIe where there is a pair without. Units: GB/s a direction."""
    if not pairs:
        return _DEFAULT_GBPS
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _detect_dma_connectivity  # type: ignore[attr-defined]

    try:
        links = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix
    except RuntimeError as error:  # no NVML
        _LOG.warning("can't count NVLinks, taken for those of an H200: %s", error)
        return _DEFAULT_GBPS
    fewest = min(links[one][other] for one, other in pairs)
    return fewest * _NVLINK_GBPS if fewest else _PCIE_GBPS


def driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """As the kernel module says it; None where there is none."""
    words = path.read_text().split() if path.exists() else []
    return next((word for word in words if word[0].isdigit() and "." in word), None)


def _gpu(name: str, capability: tuple[int, int], num_sms: int) -> Gpu:
    for known in (GB200, H200):
        if known.name in name:
            return replace(known, num_sms=num_sms)
    suffix = "a" if capability[0] >= 9 else ""
    return replace(
        H200,
        name=name,
        arch=f"sm_{capability[0]}{capability[1]}{suffix}",
        num_sms=num_sms,
        peak_tflops=H200.peak_tflops * num_sms / H200.num_sms,
    )
