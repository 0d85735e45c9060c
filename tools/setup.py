"""Makes `.venv` ready: Python, torch, this package and what its tests need. Standard library only.

Where the system's Python has torch with two CUDA devices, that torch is used; elsewhere torch's CPU build is
installed. On Debian, as root, missing system packages are installed too; otherwise the command to run is named.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "2.13.0"
OLDEST_PYTHON = (3, 11)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
GPU_PROBE = "import torch, sys; sys.exit(0 if torch.cuda.is_available() and torch.cuda.device_count() > 1 else 1)"
# import name -> requirement; on a GPU machine without a package registry only what is there can be used
NEEDED = {
    "networkx": "networkx", "rich": "rich", "jinja2": "jinja2", "numpy": "numpy", "matplotlib": "matplotlib",
    "cuda.bindings": "cuda-bindings", "pytest": "pytest", "hypothesis": "hypothesis",
}  # fmt: skip
VITAL = ("networkx", "rich", "jinja2", "numpy")


def say(text: str) -> None:
    """One line of progress."""
    sys.stdout.write(f"setup: {text}\n")
    sys.stdout.flush()


def run(*command: str | Path) -> bool:
    """Run a command, output shown only where it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(f"setup: failed: {' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-4000:]}\n")
    return done.returncode == 0


def quietly(*command: str | Path) -> bool:
    """Does the command succeed? Nothing is shown; a command that does not exist fails."""
    if not shutil.which(str(command[0])):
        return False
    return subprocess.run([str(part) for part in command], capture_output=True, check=False).returncode == 0


def system_packages(wanted: dict[str, bool], why: str, can_do_without: bool = False) -> None:
    """Install the Debian packages whose value is True; else stop and say how to, or only say it."""
    missing = [name for name, is_missing in wanted.items() if is_missing]
    if not missing:
        return
    command = f"apt-get install -y {' '.join(missing)}"
    give_up = say if can_do_without else stop
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        give_up(f"{why} needs {', '.join(missing)}; run: sudo {command}")
        return
    say(f"{command}   ({why})")
    os.environ["DEBIAN_FRONTEND"] = "noninteractive"
    if not (run("apt-get", "update", "-q") and run(*command.split())):
        give_up(f"could not install {', '.join(missing)} ({why})")


def stop(text: str) -> None:
    """End with an error."""
    sys.exit(f"setup: {text}")


def has_module(python: Path | str, name: str) -> bool:
    """Can this Python import the module?"""
    return quietly(python, "-c", f"import {name}")


def make_environment(venv: Path, with_gpus: bool) -> Path:
    """Create the virtual environment; with GPUs it sees the system's packages (their torch fits the driver)."""
    python = venv / "bin" / "python"
    if not quietly(python, "-c", "import pip"):
        say(f"creating {venv}")
        # the parent's pip serves as well, and a system's Python may lack the wheels to make another one
        options = ["--system-site-packages", "--without-pip"] if with_gpus else []
        if not run(sys.executable, "-m", "venv", "--clear", *options, venv):
            sys.exit("setup: python3 -m venv failed")
        if with_gpus:
            link_parent_packages(python)
    return python


def link_parent_packages(python: Path) -> None:
    """A venv made from a venv sees the base Python's packages only: add the parent's by a .pth file."""
    site = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True,
                          text=True, check=True).stdout.strip()  # fmt: skip
    (Path(site) / "parent_packages.pth").write_text(sysconfig.get_path("purelib") + "\n")


def install_torch(python: Path) -> None:
    """torch's CPU build: from the configured indexes, from PyTorch's own, or whatever PyPI has."""
    if quietly(python, "-c", "import torch; assert tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 11)"):
        return
    say(f"installing torch {TORCH} (CPU)")
    attempts = ((f"torch=={TORCH}+cpu",), (f"torch=={TORCH}", "--index-url", CPU_INDEX))
    if not any(quietly(python, "-m", "pip", "install", "-q", *attempt) for attempt in attempts):
        say("no CPU build found; taking PyPI's build")
        if not run(python, "-m", "pip", "install", "-q", f"torch=={TORCH}"):
            sys.exit("setup: could not install torch")


def install_package(python: Path, with_gpus: bool) -> None:
    """This package, editable, with its test dependencies at the tested versions."""
    say("installing mkcompile and what its tests need")
    constraints = ["-c", str(ROOT / "tools" / "constraints.txt")]
    if not with_gpus:
        if not run(python, "-m", "pip", "install", "-q", *constraints, "-e", f"{ROOT}[test]"):
            sys.exit("setup: could not install mkcompile")
        return
    missing = [requirement for module, requirement in NEEDED.items() if not has_module(python, module)]
    # such machines are often cut off: one short try
    if missing and not quietly(python, "-m", "pip", "install", "-q", "--retries", "0", "--timeout", "10", *missing):
        vital = [name for name in missing if name in VITAL]
        (stop if vital else say)(f"can't install {', '.join(vital or missing)}" + ("" if vital else "; tests skip"))
    write_checkout_install(python)


def write_checkout_install(python: Path) -> None:
    """What an editable install would write, but with no build back end, which would have to be fetched."""
    site = Path(subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                               capture_output=True, text=True, check=True).stdout.strip())  # fmt: skip
    (site / "mkcompile_checkout.pth").write_text(f"{ROOT}\n")
    info = site / "mkcompile-0.1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mkcompile\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[torch_dynamo_backends]\nmkernel = mkcompile.backend:mkernel\n")


def build_proxy(python: Path) -> None:
    """The host proxy's shared library; without it all works but groups that span nodes."""
    say("building the host proxy")
    if not run(python, ROOT / "tools" / "build_proxy.py"):
        say("the host proxy was not built: groups that span nodes are left to the process group's own collectives")


def install_browser() -> None:
    """A browser for the tests that open the report, where that needs no password; elsewhere they say that they skip."""
    missing = not any(shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    if missing and os.geteuid() == 0 and shutil.which("apt-get"):
        system_packages({"chromium": True}, "the tests of the report")


def main() -> None:
    """Make everything ready, then leave a stamp for make."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--browser", action="store_true", help="only install a browser for the report's tests")
    args = parser.parse_args()
    args.venv = args.venv.resolve()
    if args.browser:
        install_browser()
        return
    if sys.version_info < OLDEST_PYTHON:
        sys.exit(
            f"setup: Python {'.'.join(map(str, OLDEST_PYTHON))} or newer is needed, this is {sys.version.split()[0]}"
        )
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    with_gpus = quietly(sys.executable, "-c", GPU_PROBE)
    if not with_gpus:
        system_packages({"python3-venv": not has_module(sys.executable, "ensurepip")}, "a virtual environment")
    compiler = {"g++": not shutil.which("g++"), "python3-dev": not headers.exists()}
    # Inductor's precompiled headers are named by a hash that it asks openssl for; on GPUs Triton does without
    needed = {**compiler, "openssl": not shutil.which("openssl")}
    system_packages(needed, "Inductor's C++ code", can_do_without=with_gpus)
    python = make_environment(args.venv, with_gpus)
    if not with_gpus:
        install_torch(python)
    install_package(python, with_gpus)
    build_proxy(python)
    if args.browser and os.geteuid() == 0 and shutil.which("apt-get"):
        system_packages(
            {"chromium": not (shutil.which("chromium") or shutil.which("google-chrome"))}, "the report's tests"
        )
    (args.venv / ".ready").touch()
    say("ready")


if __name__ == "__main__":
    main()
