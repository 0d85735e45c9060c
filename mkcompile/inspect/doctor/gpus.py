"""GPUs, the matrix of who reaches whom, NVLink, multicast."""

from __future__ import annotations

from collections.abc import Sequence

from mkcompile.config import ForeignSettings
from mkcompile.inspect.doctor.check import Check, Section
from mkcompile.inspect.doctor.machine import GpuInfo, Machine
from mkcompile.inspect.units import bytes_text

KERNELS_FROM = (9, 0)


def section(machine: Machine, foreign: ForeignSettings) -> Section:
    """All about the GPUs of this machine."""
    gpus = machine.gpus()
    if not gpus:
        return Section(title="GPUs", checks=(_gpus(gpus),))
    links = machine.nvlinks() if len(gpus) > 1 else ()
    return Section(
        title="GPUs",
        checks=(_gpus(gpus), _peers(machine, len(gpus)), _nvlink(links, len(gpus)), multicast(machine, foreign)),
        matrix=_matrix(machine, links, len(gpus)),
    )


def _gpus(gpus: Sequence[GpuInfo]) -> Check:
    old = [f"{i}: {one.name}" for i, one in enumerate(gpus) if one.capability < KERNELS_FROM]
    listed = "; ".join(
        f"{i}: {one.name}, sm_{''.join(map(str, one.capability))}, {one.num_sms} SMs, {bytes_text(one.memory_bytes)}"
        for i, one in enumerate(gpus)
    )
    return Check(
        name="GPUs",
        status="missing" if not gpus else "broken" if old else "ok",
        found=listed or "none",
        cost="operators run as their reference: right, but not faster"
        if not gpus
        else f"the fused kernels need compute capability 9.0 (Hopper): {', '.join(old)} run the reference",
        remedy="use two or more H100, H200 or later; plan for them with `explain --world N --topology NAME`",
    )


def _pairs(num_gpus: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(num_gpus) for j in range(num_gpus) if i != j]


def _peers(machine: Machine, num_gpus: int) -> Check:
    cut = [f"{i}->{j}" for i, j in _pairs(num_gpus) if not machine.peer_access(i, j)]
    if num_gpus == 1:
        found = "one GPU has no peers"
    else:
        found = f"no access: {', '.join(cut)}" if cut else "every GPU reaches every other"
    return Check(
        name="peer access",
        status="off" if num_gpus == 1 else "broken" if cut else "ok",
        found=found,
        cost="groups with such a pair are not fused: their tiles can't be written into the peer's memory",
        remedy="check `nvidia-smi topo -p2p w`; in containers and virtual machines pass all GPUs with peer access; "
        "on PCIe switches turn ACS off",
    )


def _nvlink(links: Sequence[Sequence[int]], num_gpus: int) -> Check:
    counts = [links[i][j] for i, j in _pairs(num_gpus)] if links else []
    linked = sum(count > 0 for count in counts)
    if not counts:
        found = "one GPU" if num_gpus == 1 else "NVML does not tell"
    else:
        found = f"{linked} of {len(counts)} pairs, {max(counts)} links a pair" if linked else "no pair is linked"
    return Check(
        name="NVLink",
        status="off" if num_gpus == 1 else "ok" if counts and linked == len(counts) else "missing",
        found=found,
        cost="tiles go over PCIe, which the planner counts; most sites then stay as they are",
        remedy="use GPUs with NVLink or an NVSwitch; check `nvidia-smi nvlink --status`",
    )


def multicast(machine: Machine, foreign: ForeignSettings) -> Check:
    """NVLink multicast, and who forbids it where it is off."""
    name, cost = "multicast", "all-reduces take the peer-to-peer path; everything else is as fast without it"
    if foreign.multicast_off_by:
        return Check(
            name=name,
            status="off",
            found=f"forbidden by {foreign.multicast_off_by}",
            cost=cost,
            remedy=f"unset {foreign.multicast_off_by.partition('=')[0]}, unless someone set it for a reason",
        )
    there = machine.multicast()
    return Check(
        name=name,
        status="ok" if there else "off",
        found="offered by device and driver" if there else "not offered by device and driver",
        cost=cost,
        remedy="needs an NVSwitch with the fabric manager running (systemctl status nvidia-fabricmanager)",
    )


def _matrix(machine: Machine, links: Sequence[Sequence[int]], num_gpus: int) -> tuple[tuple[str, ...], ...]:
    """Each cell: peer access from the row's GPU to the column's, and the NVLinks between them."""
    header = ("from \\ to", *(str(j) for j in range(num_gpus)))
    rows = [
        (str(i), *("-" if i == j else _cell(machine.peer_access(i, j), links, i, j) for j in range(num_gpus)))
        for i in range(num_gpus)
    ]
    return (header, *rows)


def _cell(access: bool, links: Sequence[Sequence[int]], i: int, j: int) -> str:
    width = f" NV{links[i][j]}" if links and links[i][j] else ""
    return f"{'yes' if access else 'NO'}{width}"
