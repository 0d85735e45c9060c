"""torch, Inductor's compiler, CUDA's compiler, the optional packages."""

from __future__ import annotations

import sysconfig
from importlib import metadata
from pathlib import Path

import torch

from mkcompile.config import Settings, settings
from mkcompile.errors import CompileError, UnsupportedDeviceError
from mkcompile.inspect.doctor.check import Check, Section
from mkcompile.inspect.doctor.machine import Machine
from mkcompile.runtime.nvrtc import version as nvrtc_version

OLDEST_TORCH = (2, 11)


def section(machine: Machine) -> Section:
    """Versions and compilers."""
    return Section(
        title="Software",
        checks=(
            torch_version(torch.__version__),
            distributed(),
            cpp_compiler(),
            cuda(machine),
            nvrtc(),
            kernels(settings()),
            transformers(),
        ),
    )


def torch_version(version: str) -> Check:
    """torch is new enough."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    oldest = ".".join(map(str, OLDEST_TORCH))
    return Check(
        name="torch",
        status="ok" if numbers >= OLDEST_TORCH else "broken",
        found=version,
        cost=f"the passes are written for the graphs of torch {oldest} and later",
        remedy=f"pip install 'torch>={oldest}'",
        needed=True,
    )


def distributed() -> Check:
    """torch has its distributed part, with gloo at least."""
    available = torch.distributed.is_available()
    backends = [
        name
        for name, there in (
            ("gloo", available and torch.distributed.is_gloo_available()),
            ("nccl", available and torch.distributed.is_nccl_available()),
        )
        if there
    ]
    return Check(
        name="torch.distributed",
        status="ok" if backends else "missing",
        found=", ".join(backends) or "not in this build of torch",
        cost="there are no process groups, so no collectives",
        remedy="install a build of torch with distributed support",
        needed=True,
    )


def cpp_compiler() -> Check:
    """What Inductor needs for code on the CPU: a C++ compiler and Python's headers."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    try:
        compiler = get_cpp_compiler()
    except InvalidCxxCompiler:
        compiler = ""
    found = compiler or "no C++ compiler"
    if not headers.exists():
        found += f", no {headers}"
    return Check(
        name="C++ compiler",
        status="ok" if compiler and headers.exists() else "missing",
        found=found,
        cost="Inductor can't generate code for the CPU, so torch.compile fails there",
        remedy="apt-get install g++ python3-dev (or set CXX to a compiler)",
        needed=not torch.cuda.is_available(),
    )


def cuda(machine: Machine) -> Check:
    """CUDA in torch, and the driver."""
    build, driver = machine.cuda_build(), machine.driver()
    built = f"torch for CUDA {build}" if build else "torch without CUDA"
    return Check(
        name="CUDA",
        status="ok" if build and driver else "missing",
        found=f"{built}, {'driver ' + driver if driver else 'no driver'}",
        cost="operators run as their reference on the CPU; nothing gets faster",
        remedy="an NVIDIA driver of release 580 or later, and a CUDA build of torch (pip install torch)",
    )


def nvrtc() -> Check:
    """NVIDIA's run-time compiler, as the kernels get it."""
    try:
        found, there = nvrtc_version(), True
    except (UnsupportedDeviceError, CompileError) as error:
        found, there = str(error), False
    return Check(
        name="NVRTC",
        status="ok" if there else "missing",
        found=found,
        cost="fused kernels can't be compiled; operators run as ATen and NCCL calls",
        remedy="pip install 'mkcompile[cuda]' nvidia-cuda-nvrtc",
    )


def kernels(ours: Settings) -> Check:
    """The setting that turns all fused kernels off."""
    return Check(
        name="fused kernels",
        status="ok" if ours.kernels else "off",
        found="allowed" if ours.kernels else "forbidden by MKCOMPILE_KERNELS=0",
        cost="operators run as their reference, ATen and NCCL calls",
        remedy="unset MKCOMPILE_KERNELS",
    )


def transformers() -> Check:
    """Wanted by the demo and the examples only."""
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        version = ""
    return Check(
        name="transformers",
        status="ok" if version else "off",
        found=version or "not installed",
        cost="the demo and `explain mkcompile.inspect.examples:llama` need it",
        remedy="pip install transformers accelerate",
    )
