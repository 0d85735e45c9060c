"""Which NIC a GPU gets, on made-up machines: trees as the kernel shows them, in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from mkcompile.errors import NoDeviceError
from mkcompile.runtime.proxy import NicChoice, ProxyConfig, choose_nic, pci_address, with_nic
from mkcompile.runtime.proxy.machine_tree import find_gpus
from mkcompile.runtime.proxy.nic_choice import gbps_of_a_gpu
from mkcompile.runtime.proxy.nics import find_nics

GPU_CLASS, NIC_CLASS = "0x030200", "0x020700"


@dataclass(frozen=True)
class Machine:
    """A folder that looks like /sys."""

    root: Path

    def add(self, path: str, numa: int = -1, vendor: str = "0x10de", kind: str = GPU_CLASS) -> Path:
        """A PCI function by its way from the root complex: "pci0000:10/0000:10:01.0/0000:11:00.0"."""
        folder = self.root / "devices" / path
        folder.mkdir(parents=True)
        for name, text in (("vendor", vendor), ("class", kind), ("numa_node", str(numa))):
            (folder / name).write_text(f"{text}\n")
        devices = self.root / "bus" / "pci" / "devices"
        devices.mkdir(parents=True, exist_ok=True)
        (devices / folder.name).symlink_to(folder)
        return folder

    def add_nic(self, name: str, path: str = "", numa: int = -1, driver: str = "mlx5_core", **port: str) -> None:
        """A verbs device on a PCI function, or on none."""
        ports = self.root / "class" / "infiniband" / name / "ports" / "1"
        ports.mkdir(parents=True)
        (ports / "state").write_text(port.get("state", "4: ACTIVE") + "\n")
        (ports / "rate").write_text(port.get("rate", "400 Gb/sec (4X NDR)") + "\n")
        if path:
            folder = self.add(path, numa, vendor="0x15b3", kind=NIC_CLASS)
            drivers = self.root / "bus" / "drivers" / driver
            drivers.mkdir(parents=True, exist_ok=True)
            (folder / "driver").symlink_to(drivers)
            (ports.parent.parent / "device").symlink_to(folder)

    def add_nodes(self, *rows: str) -> None:
        for number, row in enumerate(rows):
            folder = self.root / "devices" / "system" / "node" / f"node{number}"
            folder.mkdir(parents=True)
            (folder / "distance").write_text(f"{row}\n")

    def choose(self, gpu: str, transport: str = "rc", among: tuple[str, ...] = ()) -> NicChoice:
        return choose_nic(gpu, transport, among, self.root)

    def names(self, transport: str = "rc") -> list[str]:
        return [self.choose(gpu, transport).name for gpu in find_gpus(self.root)]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def big_machine(machine: Machine) -> Machine:
    """Two sockets, two switches each, two GPUs and two NICs at a switch, and a slow NIC for storage at the first."""
    machine.add_nodes("10 21", "21 10")
    for switch in range(4):
        bus = 0x10 + 0x20 * switch
        above = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0"
        for i in range(2):
            machine.add(f"{above}/0000:{bus + 1:02x}:{i:02x}.0/0000:{bus + 2 + i:02x}:00.0", numa=switch // 2)
            nic = f"{above}/0000:{bus + 1:02x}:{i + 4:02x}.0/0000:{bus + 8 + i:02x}:00.0"
            machine.add_nic(f"mlx5_{2 * switch + i}", nic, numa=switch // 2)
    storage = "pci0000:10/0000:10:01.0/0000:11:09.0/0000:1f:00.0"
    machine.add_nic("mlx5_a", storage, numa=0, rate="100 Gb/sec (4X EDR)")
    return machine


def test_gpus_and_nics_at_one_switch_are_paired(machine: Machine) -> None:
    big_machine(machine)
    assert len(find_gpus(machine.root)) == 8 and len(find_nics(machine.root)) == 9
    assert machine.names() == [f"mlx5_{i}" for i in range(8)]
    assert "4 PCIe hops away, as 2 are; turn 1" in machine.choose(find_gpus(machine.root)[3]).reason


def test_a_nic_that_is_down_leaves_its_gpu_to_the_other_one(machine: Machine) -> None:
    big_machine(machine)
    state = machine.root / "class" / "infiniband" / "mlx5_5" / "ports" / "1" / "state"
    state.write_text("1: DOWN\n")
    assert machine.names() == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "mlx5_4", "mlx5_4", "mlx5_6", "mlx5_7"]


def test_gpus_that_share_a_nic_share_its_rate(machine: Machine) -> None:
    """The planner's rails: GB/s of the GPU that has least."""
    big_machine(machine)
    assert gbps_of_a_gpu("rc", root=machine.root) == 50
    assert gbps_of_a_gpu("rc", ("mlx5_1", "mlx5_6"), machine.root) == 12.5
    assert gbps_of_a_gpu("srd", root=machine.root) == 0
    (machine.root / "class" / "infiniband" / "mlx5_5" / "ports" / "1" / "state").write_text("1: DOWN\n")
    assert gbps_of_a_gpu("rc", root=machine.root) == 25


def test_only_nics_that_are_named_are_chosen_among(machine: Machine) -> None:
    big_machine(machine)
    gpus = find_gpus(machine.root)
    few = ("mlx5_1", "mlx5_6")
    assert [machine.choose(gpu, among=few).name for gpu in gpus] == ["mlx5_1"] * 4 + ["mlx5_6"] * 4
    assert "NUMA node" in machine.choose(gpus[2], among=few).reason
    assert machine.choose(gpus[0], among=("mlx5_7",)).name == "mlx5_7"


def test_on_one_numa_node_distance_by_hops_does_not_decide_between_complexes(machine: Machine) -> None:
    machine.add("pci0000:10/0000:10:01.0/0000:11:00.0", numa=0)
    machine.add("pci0000:80/0000:80:01.0/0000:81:00.0", numa=1)
    machine.add_nic("far", "pci0000:90/0000:90:01.0/0000:91:00.0", numa=1)
    machine.add_nic("near", "pci0000:20/0000:20:01.0/0000:21:00.0", numa=0)
    assert machine.names() == ["near", "far"]
    assert machine.choose("0000:11:00.0").reason == "on the same NUMA node"


def test_numa_distances_decide_between_sockets(machine: Machine) -> None:
    machine.add_nodes("10 12 32", "12 10 32", "32 32 10")
    machine.add("pci0000:10/0000:10:01.0/0000:11:00.0", numa=0)
    machine.add_nic("a", "pci0000:90/0000:90:01.0/0000:91:00.0", numa=2)
    machine.add_nic("b", "pci0000:50/0000:50:01.0/0000:51:00.0", numa=1)
    assert machine.names() == ["b"]
    assert machine.choose("0000:11:00.0").reason == "on another NUMA node"


def test_gpus_that_have_no_nic_near_share_the_far_ones(machine: Machine) -> None:
    for i in range(4):
        machine.add(f"pci0000:{i}0/0000:{i}0:01.0/0000:{i}1:00.0", numa=0)
    for i in range(2):
        machine.add_nic(f"mlx5_{i}", f"pci0000:{8 + i}0/0000:{8 + i}0:01.0/0000:{8 + i}1:00.0", numa=1)
    assert machine.names() == ["mlx5_0", "mlx5_1", "mlx5_0", "mlx5_1"]


def test_without_numa_nodes_the_machine_joins_all(machine: Machine) -> None:
    machine.add("pci0000:00/0000:00:05.0")
    machine.add_nic("same", "pci0000:00/0000:00:06.0")
    machine.add_nic("other", "pci0000:80/0000:80:06.0")
    assert machine.names() == ["same"]


def test_where_no_path_is_known_gpus_take_turns(machine: Machine) -> None:
    machine.add("pci0000:00/0000:00:05.0")
    machine.add("pci0000:00/0000:00:06.0")
    machine.add_nic("rxe0")
    machine.add_nic("rxe1")
    assert machine.names() == ["rxe0", "rxe1"]
    assert "no PCIe path" in machine.choose("0000:00:05.0").reason
    assert machine.choose("0000:77:00.0").name == "rxe0"  # a GPU that the kernel does not show
    assert machine.choose("").name == "rxe0"  # a rank on the CPU


def test_efa_speaks_srd_alone(machine: Machine) -> None:
    machine.add("pci0000:10/0000:10:01.0/0000:11:00.0")
    machine.add_nic("rdmap0", "pci0000:10/0000:10:02.0/0000:12:00.0", driver="efa")
    machine.add_nic("mlx5_0", "pci0000:80/0000:80:01.0/0000:81:00.0")
    assert (machine.names("srd"), machine.names("rc")) == (["rdmap0"], ["mlx5_0"])


def test_no_nic_is_an_error_that_says_which_were_looked_at(machine: Machine) -> None:
    with pytest.raises(NoDeviceError, match="no NIC of this machine speaks rc"):
        machine.choose("0000:00:05.0")
    machine.add_nic("mlx5_0", "pci0000:00/0000:00:06.0", state="1: DOWN")
    with pytest.raises(NoDeviceError, match="no such port is active; there are mlx5_0/1 DOWN"):
        machine.choose("0000:00:05.0")
    for name in ("mlx5_1", "mlx5_0/2"):
        with pytest.raises(NoDeviceError, match="there are mlx5_0/1 DOWN"):
            machine.choose("0000:00:05.0", among=(name,))


def test_ports_are_chosen_among_as_they_are_named(machine: Machine) -> None:
    big_machine(machine)
    for port in ("2", "3"):
        folder = machine.root / "class" / "infiniband" / "mlx5_0" / "ports" / port
        folder.mkdir()
        (folder / "state").write_text("4: ACTIVE\n" if port == "2" else "1: DOWN\n")
        (folder / "rate").write_text("400 Gb/sec (4X NDR)\n")
    gpus = find_gpus(machine.root)
    assert [machine.choose(gpu, among=("mlx5_0/2", "mlx5_1/1")).name for gpu in gpus[:2]] == ["mlx5_0/2", "mlx5_1/1"]
    assert machine.choose(gpus[0], among=("mlx5_0/3", "mlx5_7")).name == "mlx5_7"


def test_a_container_has_the_nics_whose_devices_it_was_given(machine: Machine) -> None:
    for number in range(2):
        machine.add_nic(f"mlx5_{number}")
        folder = machine.root / "class" / "infiniband_verbs" / f"uverbs{number}"
        folder.mkdir(parents=True)
        (folder / "ibdev").write_text(f"mlx5_{number}\n")
    dev = machine.root / "dev"
    (dev / "infiniband").mkdir(parents=True)
    (dev / "infiniband" / "uverbs1").touch()
    assert [one.name for one in find_nics(machine.root, dev) if one.is_usable] == ["mlx5_1"]


def test_a_rank_on_the_cpu_has_no_pci_address() -> None:
    assert pci_address(torch.device("cpu")) == ""


def test_a_config_that_names_one_nic_or_none_at_hand_stays_as_it_is() -> None:
    for config in (
        ProxyConfig(transport="rc", device="mlx5_3/2"),
        ProxyConfig(transport="tcp", device="eth0,eth1"),
        ProxyConfig(transport="emulated"),
    ):
        assert with_nic(config, None) == config
    many = ",".join(f"mlx5_{i}" for i in range(16))
    assert len(with_nic(ProxyConfig(transport="rc", device=many), None).device) < len(many)
    with_two = with_nic(ProxyConfig(transport="rc", device="no-such0,no-such1"), None)
    assert with_two.device == "no-such0"  # which the proxy then refuses, by its name, on all ranks
    for wrong in ("mlx5_1/x", "mlx5_1/0", "mlx5_1/"):  # left to the proxy, too
        assert with_nic(ProxyConfig(transport="rc", device=f"mlx5_0,{wrong}"), None).device == wrong
