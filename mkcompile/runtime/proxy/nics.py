"""The NICs of a machine that speak verbs, as the kernel tells it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mkcompile.runtime.proxy.machine_tree import PCI_ADDRESS, SYS, read

DEV = Path("/dev")


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One port, in the kernel's words: link `Ethernet`, state `ACTIVE`, rate `400 Gb/sec (4X NDR)`."""

    number: int
    link: str
    state: str
    rate: str

    @property
    def is_active(self) -> bool:
        """Can data go through it?"""
        return self.state == "ACTIVE"

    @property
    def rate_gbps(self) -> float:
        """A rate that is not told counts as a slow one. Units: gigabits a second."""
        number = re.match(r"[0-9.]+", self.rate)
        return float(number.group()) if number else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """One verbs device. `pci`: address of its function, empty where it has none (Soft-RoCE). `driver`: or `unknown`.

    `can_open`: a container often sees all of the machine's, and was given few.
    """

    name: str
    pci: str
    driver: str
    ports: tuple[Port, ...]
    can_open: bool

    @property
    def is_usable(self) -> bool:
        """May this process open it, and is one of its ports active?"""
        return self.can_open and any(port.is_active for port in self.ports)

    @property
    def rate_gbps(self) -> float:
        """Of its fastest active port. Units: gigabits a second."""
        return max((port.rate_gbps for port in self.ports if port.is_active), default=0.0)


def find_nics(root: Path = SYS, dev: Path = DEV) -> list[Nic]:
    """The verbs devices, by name. `root` and `dev`: where the kernel's tree and the devices' files are."""
    folder = root / "class" / "infiniband"
    kept_out = {
        read(one / "ibdev")
        for one in (root / "class" / "infiniband_verbs").glob("uverbs*")
        if not (dev / "infiniband" / one.name).exists()
    }
    nics = sorted(folder.iterdir()) if folder.is_dir() else []
    return [_nic(one, one.name not in kept_out) for one in nics]


def _nic(folder: Path, can_open: bool) -> Nic:
    device = folder / "device"
    address = device.resolve().name if device.exists() else ""
    driver = device / "driver"
    ports = sorted((folder / "ports").iterdir()) if (folder / "ports").is_dir() else []
    return Nic(
        name=folder.name,
        pci=address if PCI_ADDRESS.fullmatch(address) else "",
        driver=driver.resolve().name if driver.exists() else "unknown",
        ports=tuple(_port(one) for one in ports),
        can_open=can_open,
    )


def _port(folder: Path) -> Port:
    return Port(
        number=int(folder.name),
        link=read(folder / "link_layer", "unknown"),
        state=read(folder / "state", "unknown").rpartition(" ")[2],
        rate=read(folder / "rate", "unknown"),
    )
