"""NICs that speak verbs, and which of them each GPU takes; which transports work is for the proxy to try."""

from __future__ import annotations

import resource
from ctypes.util import find_library
from pathlib import Path

from mkcompile.errors import NoDeviceError
from mkcompile.inspect.doctor import ports, proxy
from mkcompile.inspect.doctor.check import Check, Section
from mkcompile.runtime.proxy.machine_tree import SYS, find_gpus
from mkcompile.runtime.proxy.nic_choice import choose_nic
from mkcompile.runtime.proxy.nics import Nic, find_nics

_LOCKED_WANTED_BYTES = 1 << 30


def section(root: Path = SYS) -> Section:
    """Everything that a group across nodes needs. `root` is where the kernel's tree is mounted."""
    nics = find_nics(root)
    return Section(
        title="Network",
        checks=(
            _devices(nics),
            ports.check(),
            _library(),
            _chosen(root, nics),
            proxy.check(),
            _memory(root, nics),
            _locked(),
        ),
    )


def _devices(nics: list[Nic]) -> Check:
    listed = "; ".join(f"{one.name} ({one.driver}, {_ports(one)})" for one in nics)
    up = [one for one in nics if one.is_usable]
    return Check(
        name="verbs devices",
        status="ok" if up else "broken" if nics else "missing",
        found=listed or "none",
        cost="groups that span nodes go over TCP through host memory, or are left to NCCL",
        remedy="install the NIC's driver (rdma-core); in a container pass --device /dev/infiniband",
    )


def _ports(nic: Nic) -> str:
    number = "port {}: " if len(nic.ports) > 1 else ""
    text = "; ".join(f"{number.format(port.number)}{port.link}, {port.state}, {port.rate}" for port in nic.ports)
    return text if nic.can_open else f"{text}, no file in /dev/infiniband"


def _library() -> Check:
    library = find_library("ibverbs")
    return Check(
        name="libibverbs",
        status="ok" if library else "missing",
        found=library or "not found",
        cost="the host proxy can't open a NIC",
        remedy="apt-get install libibverbs1 ibverbs-providers",
    )


def _chosen(root: Path, nics: list[Nic]) -> Check:
    """The NIC that each GPU's proxy takes by itself, and why."""
    transport = "srd" if any(one.driver == "efa" and one.is_usable for one in nics) else "rc"
    gpus = find_gpus(root)
    lines = []
    for gpu in gpus or [""]:
        try:
            choice = choose_nic(gpu, transport, (), root)
        except NoDeviceError as error:
            lines = [error.report.detail]
            break
        lines.append(f"{gpu or 'a rank on the CPU'}: {choice.name} ({choice.reason})")
    active = any(one.is_usable for one in nics)
    return Check(
        name="NIC of each GPU",
        status="ok" if active else "off",
        found="; ".join(lines),
        cost="no GPU sends over a NIC",
        remedy="MKCOMPILE_NETWORK=rc:NIC, or rc:NIC,NIC,... to choose the nearest of some",
    )


def _memory(root: Path, nics: list[Nic]) -> Check:
    peermem = (root / "module" / "nvidia_peermem").exists()
    return Check(
        name="GPU memory for NICs",
        status="ok" if peermem else "off",
        found="nvidia_peermem is loaded" if peermem else "no nvidia_peermem; dma-buf is tried first in any case",
        cost="where dma-buf fails too, data is staged in host memory" if nics else "nothing without a NIC",
        remedy="modprobe nvidia_peermem, or the open kernel modules of the driver (for dma-buf)",
    )


def _locked() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    enough = soft == resource.RLIM_INFINITY or soft >= _LOCKED_WANTED_BYTES
    return Check(
        name="locked memory",
        status="ok" if enough else "off",
        found="unlimited" if soft == resource.RLIM_INFINITY else f"{soft / 1e6:.1f} MB",
        cost="registering the arena with a NIC fails with ENOMEM",
        remedy="ulimit -l unlimited (docker run --ulimit memlock=-1)",
    )
