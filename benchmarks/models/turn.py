"""Pairs of processes compile side by side, and take turns on the GPUs.

Compiling needs processors only, and most of the time. One lock, a file, is held by the pair that uses the GPUs: rank 0
takes it, then tells its peers. So a row is timed on otherwise idle GPUs although others are compiled meanwhile.

Where launches and not kernels take the time, processors must be idle, too: with `quiet`, a second lock is shared by all
pairs that compile, and a pair that times has it alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path

import torch
import torch.distributed as dist

_MEASURING = -10


def _set_niceness(niceness: int) -> None:
    """Of all threads of this process, where that is allowed: whoever measures is not kept waiting by who compiles."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(task.name), niceness)


@dataclass(slots=True)
class Turn:
    """The lock as one pair sees it; `host_group` is a gloo group of its ranks.

    Units: `waited_s` seconds so far for the GPUs, `held_s` seconds with them.
    """

    path: Path
    host_group: dist.ProcessGroup
    quiet: bool = False
    waited_s: float = 0.0
    held_s: float = 0.0
    _file: BufferedRandom | None = None
    _held: bool = False
    _kept: bool = False
    _since: float = 0.0
    _compiling: BufferedRandom | None = None

    def start_compiling(self) -> None:
        """From now on this pair compiles."""
        if self.quiet and dist.get_rank() == 0:
            self._compiling = self.path.with_name("compiling.lock").open("a+b")
            fcntl.flock(self._compiling, fcntl.LOCK_SH)

    def stop_compiling(self) -> None:
        """Wait until no pair compiles any more; none starts to before this one has finished its cell. Collective."""
        if self._compiling is not None:
            fcntl.flock(self._compiling, fcntl.LOCK_UN)
            fcntl.flock(self._compiling, fcntl.LOCK_EX)
        if self.quiet:
            dist.barrier(group=self.host_group)

    def finish_cell(self) -> None:
        """Others may compile, or time."""
        if self._compiling is not None:
            self._compiling.close()
            self._compiling = None

    def enter(self) -> None:
        """Wait for the GPUs. Collective over the pair; nothing if they are ours already."""
        if self._held:
            return
        started = time.perf_counter()
        dist.barrier(group=self.host_group)  # no pair holds the GPUs while one of its ranks still compiles
        if dist.get_rank() == 0:
            self._file = self.path.open("a+b")
            fcntl.flock(self._file, fcntl.LOCK_EX)
        dist.barrier(group=self.host_group)
        self._held = True
        _set_niceness(_MEASURING)
        self._since = time.perf_counter()
        self.waited_s += self._since - started

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Whatever leaves meanwhile stays: several steps in one turn. Collective. An error that comes out of here ends
        the pair, and with it the turn.
        """
        if self._kept:
            yield
            return
        self.enter()
        self._kept = True
        yield
        self._kept = False
        self.leave()

    def leave(self) -> None:
        """Finish what runs on this rank's GPU and let another pair have them; nothing if they are not ours."""
        if not self._held or self._kept:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # memory is shared, too
        _set_niceness(0)
        dist.barrier(group=self.host_group)
        self._held = False
        self.held_s += time.perf_counter() - self._since
        if self._file is not None:
            self._file.close()
            self._file = None
