"""Which NIC a GPU's proxy uses: the nearest by PCIe and NUMA, and of equally near ones a different one for each GPU."""

from __future__ import annotations

import ctypes
import errno
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import networkx as nx
import torch

from mkcompile.errors import NoDeviceError, TransportReport
from mkcompile.runtime.driver import check, library
from mkcompile.runtime.proxy.machine_tree import SYS, find_gpus, machine_tree
from mkcompile.runtime.proxy.nics import Nic, find_nics

_FAR = float("inf")
_NAME = re.compile(r"[^/]+(/[1-9][0-9]*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class NicChoice:
    """A NIC, and why it was taken."""

    name: str
    reason: str


def pci_address(device: torch.device) -> str:
    """Where a CUDA device sits, as the kernel writes it; empty for any other device.

    Raises: DriverError where the driver does not know the device.
    """
    if device.type != "cuda":
        return ""
    text = ctypes.create_string_buffer(32)
    check("cuDeviceGetPCIBusId", library().cuDeviceGetPCIBusId(text, len(text), device.index or 0))
    return text.value.decode().lower()


def choose_nic(gpu: str, transport: str, among: Sequence[str] = (), root: Path = SYS) -> NicChoice:
    """The NIC for the GPU at this PCI address. The same answer in each process of the machine, without talking.

    `among`: names that may be taken, with a port ("mlx5_0/2") or without; none: all. An empty `gpu` is a rank on the
    CPU: all NICs are equally near.
    Raises: NoDeviceError where the machine has no such NIC with an active port.
    """
    present = [one for one in find_nics(root) if _speaks(one, transport)]
    usable = [one for one in _named(present, among) if one.is_usable]
    if not usable:
        raise NoDeviceError(_nothing(transport, among, present))
    if len(usable) == 1:
        return NicChoice(name=usable[0].name, reason="the only one with an active port")
    gpus = sorted({*find_gpus(root), gpu} - {""})
    graph = machine_tree([*gpus, *(one.pci for one in usable if one.pci)], root)
    nearest, distance = _nearest(graph, gpu, usable)
    rivals = [one for one in gpus if _nearest(graph, one, usable)[0] == nearest]
    place = rivals.index(gpu) if gpu in rivals else 0
    chosen = nearest[place % len(nearest)]
    return NicChoice(name=chosen.name, reason=_why(distance, nearest, place))


def gbps_of_a_gpu(transport: str, among: Sequence[str] = (), root: Path = SYS) -> float:
    """What this machine's NICs carry for each of its GPUs, where all of them send: of the GPU that has least. 0 where
    no NIC speaks the transport. Units: GB/s.
    """
    try:
        chosen = [choose_nic(one, transport, among, root).name for one in find_gpus(root)]
    except NoDeviceError:
        return 0.0
    rates = {one.name: one.rate_gbps for one in _named(find_nics(root), among)}
    return min((rates[name] / chosen.count(name) for name in chosen), default=0.0) / 8


def is_name(name: str) -> bool:
    """Can a NIC be called so: "mlx5_0", or "mlx5_0/2" for its second port?"""
    return _NAME.fullmatch(name) is not None


def _named(nics: Sequence[Nic], among: Sequence[str]) -> list[Nic]:
    """Those that may be taken; where a port is named, the NIC as if it had no other."""
    if not among:
        return list(nics)
    found = []
    for wanted in sorted(set(among)):
        name, _, port = wanted.partition("/")
        for nic in (one for one in nics if one.name == name):
            ports = tuple(one for one in nic.ports if not port or str(one.number) == port)
            found.append(replace(nic, name=wanted, ports=ports))
    return found


def _speaks(nic: Nic, transport: str) -> bool:
    """EFA devices speak srd and nothing else that we do."""
    return (nic.driver == "efa") == (transport == "srd")


def _nearest(graph: nx.Graph, gpu: str, nics: Sequence[Nic]) -> tuple[list[Nic], float]:
    """The nearest NICs, of these the fastest, by name; and their distance."""
    lengths = nx.single_source_dijkstra_path_length(graph, gpu) if gpu in graph else {}
    distances = {one.name: float(lengths.get(one.pci, _FAR)) for one in nics}
    least = min(distances.values())
    near = [one for one in nics if distances[one.name] == least]
    fastest = max(one.rate_gbps for one in near)
    return [one for one in near if one.rate_gbps == fastest], least


def _why(distance: float, nearest: Sequence[Nic], place: int) -> str:
    if distance == _FAR:
        where = "no PCIe path is known to any"
    elif distance < 100:
        where = f"{distance:.0f} PCIe hops away"
    elif distance < 10_000:
        where = "on the same NUMA node"
    else:
        where = "on another NUMA node"
    return where if len(nearest) == 1 else f"{where}, as {len(nearest)} are; turn {place} of the GPUs that share them"


def _nothing(transport: str, among: Sequence[str], nics: Sequence[Nic]) -> TransportReport:
    detail = f"no NIC of this machine speaks {transport}"
    if nics:
        ports = [f"{one.name}/{port.number} {port.state}" for one in nics if one.can_open for port in one.ports]
        closed = [f"{one.name} may not be opened" for one in nics if not one.can_open]
        detail = f"no such port is active; there are {', '.join(ports + closed)}"
    return TransportReport(call="choose_nic", device=", ".join(among), peer=-1, errno=errno.ENODEV, detail=detail)
