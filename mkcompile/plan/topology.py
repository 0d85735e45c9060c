"""`Topology`: which GPUs there are and what joins them. Plain fields: from a preset, or from the runtime's probe.

Everything in it is the same on every rank: rank 0 publishes it, so plans made from it are the same too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import networkx as nx

from mkcompile.errors import OptionError
from mkcompile.ops.problem import Problem

#: One NIC of 400 Gb/s, a direction. Units: GB/s.
NIC_GBPS = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU model.

    Units: `peak_tflops` dense bf16 TFLOP/s at the data sheet's clock; `hbm_gbps` GB/s; `hbm_bytes`, `l2_bytes` bytes.
    """

    name: str
    arch: str
    num_sms: int
    peak_tflops: float
    hbm_gbps: float
    hbm_bytes: int
    l2_bytes: int

    def __post_init__(self) -> None:
        if self.num_sms < 1 or min(self.peak_tflops, self.hbm_gbps) <= 0:
            raise OptionError(f"a GPU needs SMs, FLOP/s and memory bandwidth; got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """How a process group lies on the machine: `per_node` ranks in each of `num_nodes` nodes."""

    num_nodes: int
    per_node: int

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return self.num_nodes * self.per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Nodes of GPUs. A node is one NVLink domain: 8 GPUs of a server, or 72 of a rack.

    `p2p`: every GPU of a node can load from and store to every other. `multicast`: the switch reduces and broadcasts
    (device, driver and environment all allow it). `transport`: what carries fused kernels' data between nodes; empty:
    nothing does. `versions` names what measurements depend on (driver, CUDA, torch).
    Units: GB/s per GPU and direction, from the data sheet; microseconds.
    """

    name: str
    gpu: Gpu
    num_nodes: int = 1
    gpus_per_node: int = 8
    nvlink_gbps: float = 450.0
    p2p: bool = True
    multicast: bool = False
    nic_gbps: float = 0.0
    nic_latency_us: float = 6.0
    transport: str = "rc"
    versions: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.gpus_per_node < 1:
            raise OptionError(f"topology {self.name}: needs at least one node and one GPU a node")
        if self.num_nodes > 1 and self.nic_gbps <= 0:
            raise OptionError(f"topology {self.name}: {self.num_nodes} nodes need nic_gbps")

    @property
    def num_gpus(self) -> int:
        """All GPUs."""
        return self.num_nodes * self.gpus_per_node

    def span(self, world_size: int) -> Span:
        """Where a group of consecutive ranks lies. Uneven remainders count as whole nodes (the slower reading)."""
        if world_size <= self.gpus_per_node:
            return Span(num_nodes=1, per_node=world_size)
        return Span(num_nodes=-(-world_size // self.gpus_per_node), per_node=self.gpus_per_node)

    def span_of(self, problem: Problem) -> Span:
        """Where the problem's group lies: as it says itself, else as consecutive ranks do."""
        if problem.num_nodes:
            return Span(num_nodes=problem.num_nodes, per_node=problem.per_node)
        return self.span(problem.world_size)

    def node_of(self, rank: int) -> int:
        """The node of a rank of the whole job, where ranks fill nodes in order."""
        return rank // self.gpus_per_node

    def reaching(self, num_nodes: int) -> Topology:
        """The machine with at least so many nodes; a network that nothing is known of is taken for one NIC a GPU."""
        if num_nodes <= self.num_nodes and (num_nodes <= 1 or self.nic_gbps > 0):
            return self
        nodes = max(num_nodes, self.num_nodes)
        return replace(self, name=f"{nodes}x{self.name}", num_nodes=nodes, nic_gbps=self.nic_gbps or NIC_GBPS)

    def graph(self) -> nx.Graph:
        """GPUs, switches, NICs and rails; every edge has `gbps` (GB/s per direction) and `kind`."""
        graph = nx.Graph(name=self.name)
        for node in range(self.num_nodes):
            for index in range(self.gpus_per_node):
                self._add_gpu(graph, node, index)
        return graph

    def _add_gpu(self, graph: nx.Graph, node: int, index: int) -> None:
        gpu = f"gpu:{node}.{index}"
        graph.add_node(gpu, kind="gpu", node=node, rail=index)
        if self.gpus_per_node > 1:
            graph.add_node(f"switch:{node}", kind="switch", node=node)
            graph.add_edge(gpu, f"switch:{node}", kind="nvlink" if self.p2p else "host", gbps=self.nvlink_gbps)
        if self.nic_gbps > 0:
            nic, rail = f"nic:{node}.{index}", f"rail:{index}"
            graph.add_node(nic, kind="nic", node=node, rail=index)
            graph.add_node(rail, kind="rail", rail=index)
            graph.add_edge(gpu, nic, kind="pcie", gbps=self.nic_gbps)
            graph.add_edge(nic, rail, kind="network", gbps=self.nic_gbps)

    def path_gbps(self, source: int, target: int) -> float:
        """Bandwidth of the path between two ranks: the narrowest edge. Across nodes data changes the rail by NVLink.

        Units: GB/s. Raises: OptionError where nothing joins the two.
        """
        graph = self.graph()
        names = [f"gpu:{rank // self.gpus_per_node}.{rank % self.gpus_per_node}" for rank in (source, target)]
        try:
            path = nx.shortest_path(graph, *names)
        except (nx.NetworkXNoPath, nx.NodeNotFound) as error:
            raise OptionError(f"topology {self.name}: no path between ranks {source} and {target}") from error
        widths = [float(graph.edges[edge]["gbps"]) for edge in nx.utils.pairwise(path)]
        return min(widths, default=float("inf"))

    def key(self) -> str:
        """A name for everything that a plan depends on; versions are not part of it."""
        return _text(asdict(replace(self, versions={})))

    def node_key(self) -> str:
        """The same for plans of groups inside one node, however many there are and whatever joins them."""
        kept = ("gpu", "gpus_per_node", "nvlink_gbps", "p2p", "multicast")
        return _text({name: value for name, value in asdict(self).items() if name in kept})

    def describe(self) -> str:
        """Several lines for people."""
        gpu = self.gpu
        lines = [
            f"{self.name}: {self.num_nodes} node(s) x {self.gpus_per_node} {gpu.name} = {self.num_gpus} GPUs",
            f"  GPU      {gpu.num_sms} SMs ({gpu.arch}), {gpu.peak_tflops:g} TFLOP/s, memory {gpu.hbm_gbps:g} GB/s",
            f"  NVLink   {self.nvlink_gbps:g} GB/s per direction, peer access {'yes' if self.p2p else 'NO'}, "
            f"multicast {'yes' if self.multicast else 'no'}",
        ]
        if self.nic_gbps > 0:
            carrier = f"by {self.transport}" if self.transport else "no fused kernels over it"
            lines.append(f"  network  {self.nic_gbps:g} GB/s a GPU, {self.gpus_per_node} rails, {carrier}")
        lines += [f"  {name:8} {version}" for name, version in sorted(self.versions.items())]
        return "\n".join(lines)

    def to_json(self) -> str:
        """One line, keys sorted; `from_json` reads it."""
        return json.dumps({**asdict(self), "versions": dict(self.versions)}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """Raises: OptionError for text that `to_json` did not write."""
        try:
            values: dict[str, Any] = json.loads(text)
            return cls(**{**values, "gpu": Gpu(**values["gpu"])})
        except (ValueError, TypeError, KeyError) as error:
            raise OptionError(f"not a topology: {error}") from error


def _text(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


H200 = Gpu(
    name="H200", arch="sm_90a", num_sms=132, peak_tflops=989.5, hbm_gbps=4800, hbm_bytes=141 << 30, l2_bytes=50 << 20
)
GB200 = Gpu(
    name="GB200", arch="sm_100a", num_sms=148, peak_tflops=2500, hbm_gbps=8000, hbm_bytes=186 << 30, l2_bytes=126 << 20
)
# The reference path on tensors of the CPU: nothing of it is predicted, so `auto` fuses nothing there.
CPU = Gpu(name="CPU", arch="cpu", num_sms=1, peak_tflops=0.5, hbm_gbps=50, hbm_bytes=64 << 30, l2_bytes=32 << 20)

_PRESETS = (
    Topology(name="cpu", gpu=CPU, gpus_per_node=2, nvlink_gbps=10),
    Topology(name="2xh200", gpu=H200, gpus_per_node=2),
    Topology(name="4xh200", gpu=H200, gpus_per_node=4, multicast=True),
    Topology(name="8xh200", gpu=H200, gpus_per_node=8, multicast=True, nic_gbps=NIC_GBPS),
    Topology(name="2x8xh200", gpu=H200, num_nodes=2, gpus_per_node=8, multicast=True, nic_gbps=NIC_GBPS),
    Topology(name="16x8xh200", gpu=H200, num_nodes=16, gpus_per_node=8, multicast=True, nic_gbps=NIC_GBPS),
    Topology(name="gb200nvl72", gpu=GB200, gpus_per_node=72, nvlink_gbps=900, multicast=True, nic_gbps=NIC_GBPS),
)
PRESETS: Mapping[str, Topology] = {one.name: one for one in _PRESETS}


def preset(name: str, num_nodes: int | None = None) -> Topology:
    """A preset by name; `num_nodes` makes it larger or smaller.

    Raises: OptionError for an unknown name, with the known ones.
    """
    if name not in PRESETS:
        raise OptionError(f"unknown topology {name!r}; valid: {', '.join(PRESETS)}")
    found = PRESETS[name]
    if num_nodes is None or num_nodes == found.num_nodes:
        return found
    nic_gbps = found.nic_gbps or NIC_GBPS
    return replace(found, name=f"{num_nodes}x{name}", num_nodes=num_nodes, nic_gbps=nic_gbps)
