"""A discrete-event engine: streams run their tasks in order, and tasks share links.

A task starts when it is the next of its stream and all that it waits for has ended. While the tasks that run demand
more of a resource than there is, all of them slow down alike. Time jumps from one end of a task to the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# Tasks that end this close together, relative to the jump, end at once.
_TIE = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One piece of work.

    `seconds`: time alone on the machine; `compute_s`: the part of it that is there without any communication;
    `loads`: share of each resource that it uses while it runs; `after`: indices of tasks that must have ended;
    `site`: what tasks that one fused launch replaces have in common.
    """

    name: str
    stream: str
    seconds: float
    kind: str = "compute"
    compute_s: float = 0.0
    loads: Mapping[str, float] = field(default_factory=dict)
    after: tuple[int, ...] = ()
    label: str = ""
    site: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A task with the time in which it ran. Units: seconds from the start of the step."""

    task: Task
    start_s: float
    end_s: float


def run(tasks: Sequence[Task]) -> list[Event]:
    """Run all tasks; events in the order of the tasks.

    Raises: ValueError where tasks wait for each other in a circle or for a later one of their own stream.
    """
    state = _State(tasks)
    while state.left:
        state.start_ready()
        if not state.running:
            raise ValueError(f"tasks wait for ever: {[queue[0] for queue in state.queues.values() if queue]}")
        state.advance()
    return [Event(task=task, start_s=state.starts[i], end_s=state.ends[i]) for i, task in enumerate(tasks)]


class _State:
    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self.queues: dict[str, deque[int]] = {}
        for index, task in enumerate(tasks):
            self.queues.setdefault(task.stream, deque()).append(index)
        self.busy: set[str] = set()
        self.running: dict[int, float] = {}
        self.starts = [0.0] * len(tasks)
        self.ends = [0.0] * len(tasks)
        self.ended = [False] * len(tasks)
        self.left = len(tasks)
        self.now = 0.0

    def start_ready(self) -> None:
        """Start the next task of each idle stream whose predecessors have ended."""
        for stream, queue in self.queues.items():
            if not queue or stream in self.busy:
                continue
            task = self.tasks[queue[0]]
            if all(self.ended[one] for one in task.after):
                index = queue.popleft()
                self.busy.add(stream)
                self.starts[index] = self.now
                self.running[index] = task.seconds

    def advance(self) -> None:
        """Go to the next end of a task."""
        demand: dict[str, float] = {}
        for index in self.running:
            for resource, share in self.tasks[index].loads.items():
                demand[resource] = demand.get(resource, 0.0) + share
        rates = {
            index: 1.0 / max([1.0, *(demand[resource] for resource in self.tasks[index].loads)])
            for index in self.running
        }
        needed = {index: left / rates[index] for index, left in self.running.items()}
        step = min(needed.values())
        self.now += step
        for index, alone in needed.items():
            if alone <= step * (1 + _TIE):
                del self.running[index]
                self.busy.discard(self.tasks[index].stream)
                self.ends[index], self.ended[index] = self.now, True
                self.left -= 1
            else:
                self.running[index] -= step * rates[index]
