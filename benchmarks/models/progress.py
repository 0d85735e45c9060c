"""Progress of the pairs: bars on a terminal, one line a step elsewhere."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from rich import progress
from rich.console import Console


@dataclass(slots=True)
class Progress:
    """What all pairs do, and how many cells are measured; called from the pairs' threads."""

    console: Console
    num_cells: int
    started: float = field(default_factory=time.monotonic)
    _bar: progress.Progress | None = None
    _whole: progress.TaskID | None = None
    _tasks: dict[int, progress.TaskID] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _done: int = 0

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn())
            self._bar = progress.Progress(*columns, progress.TimeElapsedColumn(), console=self.console)
            self._whole = self._bar.add_task("cells", total=self.num_cells)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, pair: int, rank: int, text: str) -> None:
        """A pair begins this step."""
        if rank != 0:
            return
        with self._lock:
            if self._bar is None:
                self._print(f"pair {pair}: {text}")
                return
            if pair not in self._tasks:
                self._tasks[pair] = self._bar.add_task(text, total=None)
            self._bar.update(self._tasks[pair], description=text)

    def advance(self, num_cells: int = 1) -> None:
        """So many cells more are measured."""
        with self._lock:
            self._done += num_cells
            if self._bar is None:
                self._print(f"{self._done} of {self.num_cells} cells")
            elif self._whole is not None:
                self._bar.advance(self._whole, num_cells)

    def say(self, text: str) -> None:
        """A line that stays."""
        with self._lock:
            self._print(text)

    def _print(self, text: str) -> None:
        self.console.print(f"[{time.monotonic() - self.started:6.1f} s] {text}", markup=False, soft_wrap=True)
