"""Which cell is next: one list for all pairs, so that none is idle while another one has cells left."""

from __future__ import annotations

import fcntl
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Queue:
    """Numbers from 0, each given to one process only. `path`: a file, made when first asked."""

    path: Path

    def next(self) -> int:
        """What would be taken now."""
        return int(self.path.read_bytes() or b"0") if self.path.exists() else 0

    def take(self) -> int:
        """The next number."""
        with self.path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            number = int(file.read() or b"0")
            file.truncate(0)
            file.write(str(number + 1).encode())
        return number
