"""Cache folders: there, writable, how large."""

from __future__ import annotations

import tempfile
from pathlib import Path

from mkcompile.inspect.doctor.check import Check, Section
from mkcompile.inspect.units import bytes_text


def section(ours: Path, inductors: Path) -> Section:
    """Our folder (kernels, tuning, topology) and Inductor's."""
    return Section(
        title="Caches",
        checks=(
            folder("mkcompile cache", ours, "kernels and tuning are made again in each process", "MKCOMPILE_CACHE_DIR"),
            folder("Inductor cache", inductors, "models compile again in each process", "TORCHINDUCTOR_CACHE_DIR"),
        ),
    )


def folder(name: str, path: Path, cost: str, variable: str) -> Check:
    """Is it writable (or could it be made)?"""
    nearest = next(one for one in (path, *path.parents) if one.exists())
    problem = _write_problem(nearest)
    size = f", {bytes_text(_size_bytes(path))}" if path.is_dir() else ", not made yet"
    return Check(
        name=name,
        status="broken" if problem else "ok",
        found=f"{path}{problem or size}",
        cost=cost,
        remedy=f"make it writable, or set {variable} to a folder that is",
    )


def _write_problem(path: Path) -> str:
    if not path.is_dir():
        return f": {path} is not a folder"
    try:
        with tempfile.TemporaryFile(dir=path):
            return ""
    except OSError as error:
        return f": {error.strerror}"


def _size_bytes(path: Path) -> int:
    return sum(one.stat(follow_symlinks=False).st_size for one in path.rglob("*") if one.is_file())
