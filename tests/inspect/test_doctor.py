"""The doctor on machines that are not here: GPUs, networks and folders are stood in for."""

from __future__ import annotations

import io
import json
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from rich.console import Console

from mkcompile.config import ForeignSettings, Settings, read_foreign_settings
from mkcompile.errors import ProxyUnavailableError
from mkcompile.inspect import cli
from mkcompile.inspect.doctor import gpus, network, ports, proxy, software, storage, symmetric
from mkcompile.inspect.doctor.check import Check, Diagnosis, Section
from mkcompile.inspect.doctor.machine import GpuInfo
from mkcompile.inspect.doctor.show import diagnosis_to_dict, print_diagnosis

H200 = GpuInfo(name="NVIDIA H200", capability=(9, 0), num_sms=132, memory_bytes=150 * 10**9)
A100 = GpuInfo(name="NVIDIA A100", capability=(8, 0), num_sms=108, memory_bytes=80 * 10**9)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeMachine:
    """A machine by its facts; `cut` are the pairs without peer access."""

    devices: tuple[GpuInfo, ...] = (H200, H200)
    cut: frozenset[tuple[int, int]] = frozenset()
    links: int = 18
    offers_multicast: bool = True
    cuda: str | None = "13.0"
    driver_version: str | None = "580.95"

    def cuda_build(self) -> str | None:
        return self.cuda

    def driver(self) -> str | None:
        return self.driver_version

    def gpus(self) -> tuple[GpuInfo, ...]:
        return self.devices

    def peer_access(self, source: int, target: int) -> bool:
        return (source, target) not in self.cut

    def nvlinks(self) -> list[list[int]]:
        count = len(self.devices)
        return [[0 if i == j else self.links for j in range(count)] for i in range(count)]

    def multicast(self) -> bool:
        return self.offers_multicast


def by_name(section: Section) -> dict[str, Check]:
    return {one.name: one for one in section.checks}


def test_two_linked_gpus_are_well() -> None:
    section = gpus.section(FakeMachine(), ForeignSettings())
    assert {one.status for one in section.checks} == {"ok"}
    assert "132 SMs" in by_name(section)["GPUs"].found


def test_the_whole_matrix_is_there_with_the_missing_pair_marked() -> None:
    machine = FakeMachine(devices=(H200,) * 4, cut=frozenset({(1, 3), (2, 0)}))
    section = gpus.section(machine, ForeignSettings())
    assert by_name(section)["peer access"].found == "no access: 1->3, 2->0"
    header, *rows = section.matrix
    assert header[1:] == ("0", "1", "2", "3")
    cells = {(i, j): rows[i][j + 1] for i in range(4) for j in range(4)}
    assert all(cells[i, i] == "-" for i in range(4))
    assert {pair for pair, cell in cells.items() if cell.startswith("NO")} == {(1, 3), (2, 0)}
    assert cells[0, 1] == "yes NV18"


def test_no_gpu_one_gpu_and_an_old_gpu() -> None:
    none = by_name(gpus.section(FakeMachine(devices=()), ForeignSettings()))
    assert none["GPUs"].status == "missing" and set(none) == {"GPUs"}
    one = by_name(gpus.section(FakeMachine(devices=(H200,)), ForeignSettings()))
    assert (one["GPUs"].status, one["peer access"].status, one["NVLink"].status) == ("ok", "off", "off")
    old = by_name(gpus.section(FakeMachine(devices=(H200, A100)), ForeignSettings()))
    assert old["GPUs"].status == "broken" and "1: NVIDIA A100" in old["GPUs"].cost


def test_gpus_without_nvlink() -> None:
    found = by_name(gpus.section(FakeMachine(links=0), ForeignSettings()))
    assert found["NVLink"].status == "missing" and found["NVLink"].found == "no pair is linked"


@pytest.mark.parametrize(
    ("environment", "by"),
    [
        ({}, ""),
        ({"NCCL_NVLS_ENABLE": "1"}, ""),
        ({"NCCL_NVLS_ENABLE": "0"}, "NCCL_NVLS_ENABLE=0"),
        ({"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}, "TORCH_SYMM_MEM_DISABLE_MULTICAST=1"),
    ],
)
def test_multicast_names_who_forbids_it(environment: dict[str, str], by: str) -> None:
    foreign = read_foreign_settings(environment)
    check = gpus.multicast(FakeMachine(), foreign)
    assert foreign.multicast_off_by == by
    assert (check.status, by in check.found) == ("off" if by else "ok", True)


def test_multicast_that_the_device_lacks() -> None:
    check = gpus.multicast(FakeMachine(offers_multicast=False), ForeignSettings())
    assert check.status == "off" and "fabric" in check.remedy


def test_an_old_torch_and_a_missing_driver() -> None:
    assert software.torch_version("2.10.1+cu128").status == "broken"
    assert software.torch_version("2.11.0").status == "ok"
    assert software.torch_version("3.0.0").status == "ok"
    assert software.cuda(FakeMachine(driver_version=None)).status == "missing"
    assert software.cuda(FakeMachine()).found == "torch for CUDA 13.0, driver 580.95"


def test_kernels_that_a_setting_forbids() -> None:
    assert software.kernels(Settings()).status == "ok"
    assert "MKCOMPILE_KERNELS=0" in software.kernels(Settings(kernels=False)).found


def test_kernels_run_only_where_all_that_they_need_is_there() -> None:
    names = ("GPUs", "NVRTC", "peer access", "symmetric memory", "fused kernels")
    checks = tuple(Check(name=name, status="ok", found="") for name in names)
    assert Diagnosis(sections=(Section(title="a", checks=checks),)).can_run_kernels
    assert not Diagnosis(sections=(Section(title="a", checks=checks[1:]),)).can_run_kernels


def rank(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_symmetric_memory_that_works_fails_and_hangs() -> None:
    fine = "print('fine')"
    failing = 'import sys; print(\'{"error": "pidfd_getfd: Operation not permitted"}\'); sys.exit(1)'
    hanging = "import threading; threading.Event().wait()"
    dying = "import os; os.abort()"
    assert symmetric.check(2, [rank(fine), rank(fine)], deadline_s=60).status == "ok"
    failed = symmetric.check(2, [rank(fine), rank(failing)], deadline_s=60)
    assert failed.status == "broken" and failed.found == "rank 1: pidfd_getfd: Operation not permitted"
    assert "SYS_PTRACE" in failed.remedy
    hung = symmetric.check(2, [rank(fine), rank(hanging)], deadline_s=1)
    assert hung.found == "rank 1 did not answer within 1 s"
    assert symmetric.check(2, [rank(dying), rank(fine)], deadline_s=60).found == "rank 0: died without a word"
    assert symmetric.check(1).status == "off"


@pytest.mark.parametrize(
    ("problem", "advice"),
    [
        ("fabric error 401", "nvidia-fabricmanager"),
        ("multicast bind failed", "DISABLE_MULTICAST"),
        ("odd", "TORCH_CPP"),
    ],
)
def test_known_failures_have_advice(problem: str, advice: str) -> None:
    assert advice in symmetric.advice(problem)


def make_nic(root: Path, name: str, driver: str, state: str) -> None:
    port = root / "class" / "infiniband" / name / "ports" / "1"
    port.mkdir(parents=True)
    (port / "link_layer").write_text("Ethernet\n")
    (port / "state").write_text(f"4: {state}\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    drivers = root / "drivers" / driver
    drivers.mkdir(parents=True, exist_ok=True)
    (port.parent.parent / "device").mkdir()
    (port.parent.parent / "device" / "driver").symlink_to(drivers)


def test_nics_and_the_one_that_a_gpu_takes(tmp_path: Path) -> None:
    assert by_name(network.section(tmp_path))["NIC of each GPU"].status == "off"
    make_nic(tmp_path, "mlx5_0", "mlx5_core", "ACTIVE")
    make_nic(tmp_path, "mlx5_1", "mlx5_core", "DOWN")
    found = by_name(network.section(tmp_path))
    assert found["NIC of each GPU"].found.startswith("a rank on the CPU: mlx5_0 (")
    assert "mlx5_1 (mlx5_core, Ethernet, DOWN, 400 Gb/sec (4X NDR))" in found["verbs devices"].found
    make_nic(tmp_path, "rdmap0", "efa", "ACTIVE")
    assert "rdmap0 (" in by_name(network.section(tmp_path))["NIC of each GPU"].found
    (tmp_path / "module" / "nvidia_peermem").mkdir(parents=True)
    assert by_name(network.section(tmp_path))["GPU memory for NICs"].status == "ok"


def test_all_ports_are_told_and_what_a_container_was_not_given(tmp_path: Path) -> None:
    make_nic(tmp_path, "mlx5_0", "mlx5_core", "DOWN")
    first = tmp_path / "class" / "infiniband" / "mlx5_0" / "ports" / "1"
    shutil.copytree(first, first.parent / "2")
    (first.parent / "2" / "state").write_text("4: ACTIVE\n")
    check = by_name(network.section(tmp_path))["verbs devices"]
    assert (
        check.status == "ok" and "port 1: Ethernet, DOWN" in check.found and "port 2: Ethernet, ACTIVE" in check.found
    )
    folder = tmp_path / "class" / "infiniband_verbs" / "uverbs99"
    folder.mkdir(parents=True)
    (folder / "ibdev").write_text("mlx5_0\n")
    check = by_name(network.section(tmp_path))["verbs devices"]
    assert check.status == "broken" and "no file in /dev/infiniband" in check.found


def test_nics_that_are_all_down_are_broken(tmp_path: Path) -> None:
    make_nic(tmp_path, "mlx5_0", "mlx5_core", "DOWN")
    assert by_name(network.section(tmp_path))["verbs devices"].status == "broken"


def test_the_proxy_is_opened_on_every_transport() -> None:
    trials = [
        proxy.Trial(transport="srd", problem="no EFA device"),
        proxy.Trial(transport="rc", device="mlx5_0/1", registration="host"),
        proxy.Trial(transport="tcp", device="tcp", registration="none"),
    ]
    found = proxy.check_of(trials)
    assert found.status == "ok" and "rc: mlx5_0/1, memory registered: host" in found.found
    assert proxy.check_of(trials[2:]).status == "off" and proxy.check_of(trials[:1]).status == "broken"


def test_a_proxy_that_was_not_built_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> None:
        raise ProxyUnavailableError("the host proxy was not built")

    monkeypatch.setattr(proxy, "library", nothing)
    check = proxy.check()
    assert check.status == "missing" and "not built" in check.found and "g++" in check.remedy


def test_how_nics_reach_the_memory_of_a_gpu_is_told() -> None:
    trial = proxy.Trial(transport="rc", device="mlx5_0/1", registration="host", gpu_registration="bounce buffer")
    assert "GPU memory: bounce buffer, flags by the NIC" in str(trial)
    assert "flags by the proxy" in str(replace(trial, counts=True))


def test_the_nic_of_each_gpu_is_told(tmp_path: Path) -> None:
    assert by_name(network.section(tmp_path))["NIC of each GPU"].found == "no NIC of this machine speaks rc"
    make_nic(tmp_path, "mlx5_0", "mlx5_core", "ACTIVE")
    check = by_name(network.section(tmp_path))["NIC of each GPU"]
    assert check.status == "ok" and check.found == "a rank on the CPU: mlx5_0 (the only one with an active port)"


#: pyverbs, as far as the doctor knows it.
PYVERBS = {
    "__init__.py": "",
    "pyverbs_error.py": "class PyverbsError(Exception): pass",
    "device.py": """
from types import SimpleNamespace as S
def get_device_list(): return [S(name=b"mlx5_0")]
class Context:
    def __init__(self, name): pass
    def query_device(self): return S(fw_version="28.39.1002", vendor_id=0x2c9, phys_port_cnt=2)
    def query_port(self, number):
        state = 4 if number == 1 else 1
        return S(state=state, link_layer=2, active_speed=128, active_width=2, active_mtu=5, gid_tbl_len=4)
    def query_gid_table(self, count):
        return [S(port_num=1, gid_index=3, gid_type=2, gid_str=lambda: "::ffff:10.0.0.1")]
""",
}


def test_ports_speeds_and_firmware_by_pyverbs(tmp_path: Path) -> None:
    package = tmp_path / "pyverbs"
    package.mkdir()
    for name, text in PYVERBS.items():
        (package / name).write_text(text)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift\nPYTHONPATH={tmp_path} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    check = ports.check([str(tmp_path / "missing"), str(python)])
    assert check.status == "ok"
    assert "mlx5_0 (firmware 28.39.1002, vendor 0x2c9): port 1 active, Ethernet, 400 Gb/s, MTU 4096" in check.found
    assert "gids 3: ::ffff:10.0.0.1 (RoCE v2); port 2 down" in check.found


def test_no_pyverbs_says_so_for_each_python(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    check = ports.check([str(broken), str(tmp_path / "missing")])
    assert check.status == "off" and "ended with 3" in check.found and "No such file" in check.found


def test_cache_folders(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "one.cubin").write_bytes(bytes(2500))
    assert storage.folder("cache", tmp_path, "", "VAR").found == f"{tmp_path}, 2.5 kB"
    assert storage.folder("cache", tmp_path / "a" / "b", "", "VAR").found.endswith("not made yet")
    file = tmp_path / "file"
    file.write_text("")
    blocked = storage.folder("cache", file / "below", "", "VAR")
    assert blocked.status == "broken" and "is not a folder" in blocked.found and "VAR" in blocked.remedy


def test_only_needed_things_decide_whether_it_runs() -> None:
    optional = Check(name="NVRTC", status="missing", found="")
    needed = Check(name="torch", status="ok", found="", needed=True)
    lame = Diagnosis(sections=(Section(title="a", checks=(optional, needed)),))
    assert lame.can_run and not lame.can_run_kernels
    dead = Diagnosis(
        sections=(Section(title="a", checks=(Check(name="torch", status="broken", found="", needed=True),)),)
    )
    assert not dead.can_run


def test_the_terminal_shows_matrix_costs_and_verdict() -> None:
    section = gpus.section(FakeMachine(devices=(H200,) * 3, cut=frozenset({(0, 2)})), ForeignSettings())
    console = Console(width=140, record=True, file=io.StringIO())
    print_diagnosis(Diagnosis(sections=(section,)), console)
    text = console.export_text()
    assert "yes NV18" in text and "NO NV18" in text
    assert "turn ACS off" in text and "what it costs" in text


def test_this_machine_can_run_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the tests run the backend runs; everything that is not well has a cost and a remedy."""
    assert cli.main(["doctor", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["can_run"]
    for section in values["sections"]:
        for one in section["checks"]:
            assert one["found"]
            assert one["status"] == "ok" or (one["cost"] and one["remedy"]), one
    assert set(diagnosis_to_dict(Diagnosis(sections=()))) == {"can_run", "can_run_kernels", "sections"}
