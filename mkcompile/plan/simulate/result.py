"""What a simulation found: as a dictionary, as a table, as a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from mkcompile.plan.simulate.engine import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow:
    """All sites of one kind in one step. Units: seconds a step."""

    operator: str
    variant: str
    sites: int
    unfused_s: float
    fused_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One model on one machine. Units: seconds; `compute_s` is the work of the SMs with no communication at all."""

    model: str
    topology: str
    num_gpus: int
    layout: str
    workload: str
    compute_s: float
    unfused_s: float
    fused_s: float
    operators: tuple[OperatorRow, ...] = ()

    @property
    def exposed_unfused_s(self) -> float:
        """Communication that nothing hides, unfused."""
        return max(0.0, self.unfused_s - self.compute_s)

    @property
    def exposed_fused_s(self) -> float:
        """Communication that nothing hides, fused. A fused GEMM can be faster than cuBLAS, but not less than hidden."""
        return max(0.0, self.fused_s - self.compute_s)

    @property
    def speed_up(self) -> float:
        """Unfused over fused."""
        return self.unfused_s / self.fused_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Rows, and the events of the first row's fused step."""

    rows: tuple[StepRow, ...]
    timeline: tuple[Event, ...] = ()

    def to_dict(self, timeline: bool = False) -> dict[str, Any]:
        """Plain values. The timeline is long: on demand only."""
        rows = []
        for row in self.rows:
            derived = {
                "exposed_unfused_s": row.exposed_unfused_s,
                "exposed_fused_s": row.exposed_fused_s,
                "speed_up": row.speed_up,
            }
            rows.append({**asdict(row), **derived})
        found: dict[str, Any] = {"rows": rows}
        if timeline:
            found["timeline"] = [
                {
                    "name": event.task.name, "stream": event.task.stream, "kind": event.task.kind,
                    "label": event.task.label, "start_s": event.start_s, "end_s": event.end_s,
                }
                for event in self.timeline
            ]  # fmt: skip
        return found

    def to_json(self, timeline: bool = False) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(timeline), indent=1)

    def table(self) -> Table:
        """Steps, one a line. Milliseconds."""
        table = Table(title="Predicted steps (milliseconds)", box=SIMPLE_HEAD)
        table.add_column("model, machine, layout, step", overflow="fold")
        for name in ("compute", "unfused", "exposed", "fused", "exposed", "x"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.rows:
            times = (row.compute_s, row.unfused_s, row.exposed_unfused_s, row.fused_s, row.exposed_fused_s)
            texts = [f"{seconds * 1e3:.1f}" for seconds in times]
            what = f"{row.model} on {row.topology}, {row.layout}, {row.workload}"
            table.add_row(what, *texts, f"{row.speed_up:.2f}")
        return table

    def operator_table(self) -> Table:
        """Sites by operator, for each step. Milliseconds."""
        table = Table(title="Fused operators (milliseconds a step)", box=SIMPLE_HEAD)
        for name in ("model, layout", "operator: variants"):
            table.add_column(name, overflow="fold")
        for name in ("sites", "unfused", "fused", "x"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.rows:
            for one in row.operators:
                times = (f"{one.unfused_s * 1e3:.1f}", f"{one.fused_s * 1e3:.1f}", f"{one.unfused_s / one.fused_s:.2f}")
                what = f"{one.operator}: {one.variant}"
                table.add_row(f"{row.model}, {row.layout}", what, str(one.sites), *times)
        return table

    def plot(self, path: Path) -> None:
        """Bars of compute and exposed communication, unfused beside fused; the format follows the file's ending."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(max(6.0, 1.6 * len(self.rows) + 2), 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for side, label in ((-0.2, "unfused"), (0.2, "fused")):
            places = [i + side for i in range(len(self.rows))]
            totals = [1e3 * (row.unfused_s if label == "unfused" else row.fused_s) for row in self.rows]
            busy = [min(1e3 * row.compute_s, total) for row, total in zip(self.rows, totals, strict=True)]
            exposed = [total - part for total, part in zip(totals, busy, strict=True)]
            axes.bar(
                places, busy, 0.36, color="#4878a8" if label == "unfused" else "#2a9d6f", label=f"{label}: compute"
            )
            axes.bar(places, exposed, 0.36, bottom=busy, color="#d1662f", alpha=0.55 if label == "fused" else 1.0,
                     label=f"{label}: exposed communication")  # fmt: skip
        axes.set_xticks(range(len(self.rows)), [_title(row) for row in self.rows], fontsize=8)
        axes.set_ylabel("milliseconds a step")
        axes.legend(fontsize=8)
        figure.savefig(path, dpi=120)


def _title(row: StepRow) -> str:
    return f"{row.model}\n{row.topology}\n{row.layout}"


def merge(results: Sequence[SimulationResult]) -> SimulationResult:
    """All rows as one result."""
    rows = tuple(row for one in results for row in one.rows)
    return SimulationResult(rows=rows, timeline=results[0].timeline if results else ())
