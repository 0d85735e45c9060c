"""What the demo prints: progress while ranks work, then what became of every collective, then the differences."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from mkcompile.demo.work import Difference, Outcome


@dataclass(slots=True)
class Steps:
    """Shows the steps of all ranks: bars on a terminal, one line a step of rank 0 elsewhere."""

    console: Console
    num_ranks: int
    num_steps: int
    started: float = field(default_factory=time.monotonic)
    _progress: Progress | None = None
    _tasks: list[TaskID] = field(default_factory=list)

    def __enter__(self) -> Steps:
        if self.console.is_terminal:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())
            self._progress = Progress(*columns, console=self.console, transient=True)
            self._tasks = [
                self._progress.add_task(f"rank {rank}: starting", total=self.num_steps)
                for rank in range(self.num_ranks)
            ]
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def step(self, rank: int, text: str) -> None:
        """Rank `rank` begins this step."""
        if self._progress is not None:
            done = self._progress.tasks[rank].completed
            self._progress.update(self._tasks[rank], description=f"rank {rank}: {text}", completed=done + 1)
        elif rank == 0:
            self.console.print(f"[{time.monotonic() - self.started:5.1f} s] {text}", markup=False)


def worst(differences: Sequence[Difference]) -> tuple[Difference, Difference]:
    """The tensors that differ most from eager and from Inductor; one that is not a number counts as most."""

    def size(value: float) -> float:
        return value if value == value else float("inf")

    return max(differences, key=lambda d: size(d.from_eager)), max(differences, key=lambda d: size(d.from_inductor))


def agrees(outcomes: Sequence[Outcome], tolerance: float) -> bool:
    """Is every difference, on every rank, within the tolerance? One that is not a number is not."""
    return all(
        difference.from_eager <= tolerance and difference.from_inductor <= tolerance
        for outcome in outcomes
        for difference in outcome.differences
    )


def show_differences(console: Console, by_rank: Sequence[Sequence[Outcome]], tolerance: float) -> None:
    """One row a model: the largest difference over all ranks and tensors, and the verdict."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=f"largest difference of any element, over the tensor's largest; tolerance {tolerance:.0e}",
        title_justify="left",
    )
    for name in ("model", "tensors", "from eager", "from Inductor", ""):
        table.add_column(name)
    for outcomes in zip(*by_rank, strict=True):
        every = [difference for outcome in outcomes for difference in outcome.differences]
        eager, inductor = worst(every)
        verdict = Text("agrees", "bold green") if agrees(outcomes, tolerance) else Text("DIFFERS", "bold red")
        table.add_row(
            outcomes[0].name,
            f"{len(outcomes[0].differences)} on each of {len(outcomes)} ranks",
            f"{eager.from_eager:.1e} ({eager.tensor})",
            f"{inductor.from_inductor:.1e} ({inductor.tensor})",
            verdict,
        )
    console.print(table)
