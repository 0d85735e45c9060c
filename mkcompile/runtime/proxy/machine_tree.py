"""The tree of a machine as the kernel tells it: PCIe bridges, root complexes, NUMA nodes, and what hangs on them."""

from __future__ import annotations

import re
from pathlib import Path

import networkx as nx

SYS = Path("/sys")
#: A function's address: domain, bus, device, function.
PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
#: PCI classes of what computes and draws (3D controller, display, VGA), and the vendor whose GPUs we run on.
_GPU_CLASSES, _GPU_VENDOR = ("0x0302", "0x0300", "0x0380"), "0x10de"

# Weights of edges, so that a path through fewer NUMA nodes is always shorter, then one through fewer bridges.
_HOP, _HOST, _SOCKET = 1.0, 100.0, 10_000.0


def read(path: Path, missing: str = "") -> str:
    """A small file of the kernel's, without its line's end."""
    try:
        return path.read_text().strip()
    except OSError:  # not there, or the hardware does not answer
        return missing


def find_gpus(root: Path = SYS) -> list[str]:
    """PCI addresses of all GPUs of the machine, also of those that this process must not use, in order."""
    folder = root / "bus" / "pci" / "devices"
    functions = sorted(folder.iterdir()) if folder.is_dir() else []
    return [
        one.name
        for one in functions
        if read(one / "vendor") == _GPU_VENDOR and read(one / "class").startswith(_GPU_CLASSES)
    ]


def machine_tree(addresses: list[str], root: Path = SYS) -> nx.Graph:
    """The functions with these PCI addresses, and all that joins them; every edge has a `weight`.

    A function that the kernel does not know is a node without edges. A root complex of which no NUMA node is told
    hangs on the machine itself, as NUMA nodes do whose distances are not told.
    """
    graph = nx.Graph()
    for address in addresses:
        graph.add_node(address)
        folder = root / "bus" / "pci" / "devices" / address
        if folder.exists():
            _add_path(graph, folder)
    _join_nodes(graph, root)
    return graph


def _add_path(graph: nx.Graph, folder: Path) -> None:
    """A function, the bridges above it, its root complex, its NUMA node."""
    path = folder.resolve()
    names = [part for part in path.parts if PCI_ADDRESS.fullmatch(part) or part.startswith("pci")]
    if len(names) > 1:
        nx.add_path(graph, names, weight=_HOP)
    number = read(path / "numa_node", "-1")
    graph.add_edge(names[0], f"numa {number}" if int(number) >= 0 else "machine", weight=_HOST)


def _join_nodes(graph: nx.Graph, root: Path) -> None:
    """NUMA nodes by the distances that firmware tells (10 is a node itself, 20 a neighbour or so)."""
    nodes = sorted(int(name.split()[1]) for name in graph if name.startswith("numa "))
    online = sorted(int(path.name[4:]) for path in (root / "devices/system/node").glob("node[0-9]*"))
    for one in nodes:
        distances = read(root / f"devices/system/node/node{one}/distance").split()
        for other in nodes:
            known = dict(zip(online, distances, strict=False)).get(other)
            if other > one and known is not None:
                graph.add_edge(f"numa {one}", f"numa {other}", weight=_SOCKET * float(known) / 10)
        graph.add_edge(f"numa {one}", "machine", weight=_SOCKET)
