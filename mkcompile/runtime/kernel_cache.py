"""Compiled kernels on disk: content-addressed, so that an entry can never be stale, and shared by all ranks of a host.

A name is the hash of everything that the machine code depends on; an entry is written to a file of its own and renamed
into place, so that ranks that compile at once can't see half of one. Only files that nobody but the user could have
written are loaded: an entry becomes code on the GPU.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mkcompile.config import settings
from mkcompile.runtime import nvrtc, sources
from mkcompile.runtime.nvrtc import Cubin

_LOG = logging.getLogger(__name__)
_MAGIC = b"mkcubin1"
_DIGEST_BYTES = 32
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def entry_key(source: str, headers: Mapping[str, str], options: Sequence[str], compiler: str) -> str:
    """Hash of all that decides the machine code: texts, options, compiler version."""
    digest = hashlib.sha256()
    parts = [compiler, source, *options, *(text for item in sorted(headers.items()) for text in item)]
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()


def _pack(cubin: Cubin) -> bytes:
    log = cubin.log.encode()
    body = len(log).to_bytes(8, "little") + log + cubin.image
    return _MAGIC + hashlib.sha256(body).digest() + body


def _unpack(data: bytes) -> Cubin | None:
    start = len(_MAGIC) + _DIGEST_BYTES
    body = data[start:]
    if data[: len(_MAGIC)] != _MAGIC or hashlib.sha256(body).digest() != data[len(_MAGIC) : start]:
        return None
    log_bytes = int.from_bytes(body[:8], "little")
    return Cubin(log=body[8 : 8 + log_bytes].decode(), image=body[8 + log_bytes :])


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_MAY_WRITE


@dataclass(frozen=True, slots=True)
class KernelCache:
    """A folder of compiled kernels. What goes wrong with it costs time and a warning, never a failure."""

    folder: Path

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.cubin"

    def load(self, key: str) -> Cubin | None:
        """The entry, or None where there is none, it is damaged, or another user could have written it."""
        path = self._path(key)
        try:
            if not _is_private(os.stat(self.folder)):
                _LOG.warning("%s can be written by other users; kernels in it are not loaded", self.folder)
                return None
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            if not _is_private(os.fstat(file.fileno())):
                _LOG.warning("%s can be written by other users; it is not loaded", path)
                return None
            cubin = _unpack(file.read())
        if cubin is None:
            _LOG.warning("%s is damaged; the kernel is compiled again", path)
        return cubin

    def store(self, key: str, cubin: Cubin) -> None:
        """Add or replace an entry, visible to others only when complete."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self.folder, suffix=".part")  # mode 0600
        except OSError as error:
            _LOG.warning("kernels are not kept: %s can't be written (%s)", self.folder, error)
            return
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_pack(cubin))
            os.replace(name, self._path(key))
        except OSError as error:
            _LOG.warning("kernel not kept in %s (%s)", self.folder, error)
            Path(name).unlink(missing_ok=True)


def kept(source: str, options: Sequence[str]) -> Cubin | None:
    """What `compiled` would find on disk. Raises: UnsupportedDeviceError where NVRTC is not installed."""
    cache = KernelCache(settings().cache_dir / "kernels")
    return cache.load(entry_key(source, sources.headers(), options, nvrtc.version()))


def compiled(name: str, source: str, options: Sequence[str]) -> Cubin:
    """Machine code of a translation unit over this package's headers, from disk or from the compiler (about 1 s).

    Raises: CompileError; UnsupportedDeviceError where NVRTC is not installed.
    """
    headers = sources.headers()
    cache = KernelCache(settings().cache_dir / "kernels")
    key = entry_key(source, headers, options, nvrtc.version())
    cubin = cache.load(key)
    if cubin is None:
        cubin = nvrtc.compile_cubin(name, source, headers, options)
        cache.store(key, cubin)
    return cubin
