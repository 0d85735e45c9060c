"""Builds the host proxy of a checkout into build/host, again where its sources changed. Standard library only.

With CMake (the system's or the virtual environment's); where there is none, with the compiler alone. Exit status 0
where the library is there afterwards.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = "libmkproxy.so"
VERBS = Path("/usr/include/infiniband/verbs.h")
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-static-libstdc++",
         "-static-libgcc", "-Wl,--exclude-libs,ALL")  # fmt: skip


def say(text: str) -> None:
    """One line of progress."""
    sys.stdout.write(f"proxy: {text}\n")
    sys.stdout.flush()


def run(*command: str) -> bool:
    """Run a command, output shown only where it fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(f"proxy: failed: {' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}\n")
    return done.returncode == 0


def find_tool(name: str) -> str | None:
    """A program beside this Python, or on the path."""
    beside = Path(sys.prefix) / "bin" / name
    return str(beside) if beside.is_file() else shutil.which(name)


def is_outdated(cache: Path) -> bool:
    """Was this folder configured before what it can use now was there?"""
    text = cache.read_text()
    lacked_verbs = "MK_HAVE_VERBS_HEADER:INTERNAL=\n" in text and VERBS.is_file()
    return lacked_verbs or "MK_TESTS:BOOL=OFF" in text


def with_cmake(cmake: str, folder: Path, options: list[str], target: str) -> bool:
    """Configure where that has not been done, then build what changed."""
    cache = folder / "CMakeCache.txt"
    if cache.is_file() and is_outdated(cache):
        cache.unlink()
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if (ninja := find_tool("ninja")) else []
    configure = (cmake, "-S", str(ROOT), "-B", str(folder), *generator, "-DMK_TESTS=ON", *options)
    if not cache.is_file() and not run(*configure):
        shutil.rmtree(folder, ignore_errors=True)
        return False
    return run(cmake, "--build", str(folder), "--target", target, "-j", str(os.cpu_count() or 1))


def with_compiler(compiler: str, folder: Path) -> bool:
    """All sources in one command, without verbs; for machines that have no CMake and can't install it."""
    sources = sorted(path for path in (ROOT / "csrc" / "host").rglob("*.cc") if path.parent.name != "verbs")
    library = folder / LIBRARY
    inputs = [*sources, *(ROOT / "csrc").rglob("*.h")]
    if library.is_file() and library.stat().st_mtime > max(path.stat().st_mtime for path in inputs):
        return True
    folder.mkdir(parents=True, exist_ok=True)
    partial = library.with_suffix(".partial")
    definitions = ("-DMK_WITH_VERBS=0", "-DMK_WITH_EFA=0")
    built = run(compiler, *FLAGS, *definitions, "-Icsrc", *map(str, sources), "-ldl", "-o", str(partial))
    if built:
        partial.replace(library)
    return built


def main() -> int:
    """Build, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "host")
    parser.add_argument("--target", default="mkproxy")
    parser.add_argument("options", nargs="*", help="options of CMake, after --")
    args = parser.parse_args()
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    cmake = find_tool("cmake")
    args.folder.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{args.folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs of one checkout build one after the other
        if cmake and compiler:
            return 0 if with_cmake(cmake, args.folder, args.options, args.target) else 1
        if compiler and args.target == "mkproxy":
            return 0 if with_compiler(compiler, args.folder) else 1
    say(f"not built: needs {'CMake' if compiler else 'a C++20 compiler (apt-get install g++)'}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
