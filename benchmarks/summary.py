"""`python -m benchmarks.summary [--write]`: the README's table of operators, from the result files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .overview import GATHERS, NEWEST, Rows, best_other_ms, ours_ms
from .report import Key, geometric_mean, read

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- operators: made by python -m benchmarks.summary --write -->", "<!-- /operators -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Rows of one operator. `ours`: the name of our contender; `ceiling`: of the field that times are divided by."""

    title: str
    file: str
    op: str
    ours: str = "mkcompile"
    regime: str = "sustained"
    ceiling: str = "ceiling_ms"


LINES = (
    Line(title="GEMM + reduce-scatter", file=f"2xh200/{NEWEST}", op="gemm_reduce_scatter"),
    Line(title="GEMM + all-reduce", file=f"2xh200/{NEWEST}", op="gemm_all_reduce", ours="mkcompile_staged"),
    Line(
        title="the same, output in symmetric memory", file=f"2xh200/{NEWEST}", op="gemm_all_reduce",
        ours="mkcompile_direct",
    ),
    Line(title="all-gather + GEMM", file=f"2xh200/{GATHERS}", op="all_gather_gemm"),
    Line(
        title="few rows: GEMM + reduce-scatter", file="2xh200/small_chosen_c978b4e.jsonl", op="gemm_reduce_scatter",
        regime="graph", ceiling="floor_ms",
    ),
    Line(
        title="few rows: GEMM + all-reduce", file="2xh200/small_chosen_c978b4e.jsonl", op="gemm_all_reduce",
        regime="graph", ceiling="floor_ms",
    ),
    Line(
        title="few rows: all-gather + GEMM", file="2xh200/gather_small_c978b4e.jsonl", op="all_gather_gemm",
        regime="graph", ceiling="floor_ms",
    ),
    Line(title="GEMM alone, sustained", file="2xh200/ops_87a4b34.jsonl", op="gemm"),
    Line(title="GEMM alone, in bursts", file="1xh200/ops.jsonl", op="gemm", regime="burst"),
)  # fmt: skip


def other_ms(rows: Rows, op: str) -> float:
    """The fastest contender's time; a GEMM alone has cuBLAS beside it."""
    return rows["cublas"]["ms"] if op == "gemm" else best_other_ms(rows)


def line_of(line: Line, found: dict[Key, Rows]) -> str:
    """One line of the table: geometric means, and the range of the best other's time over ours."""
    rows = [one for key, one in found.items() if key[:2] == (line.regime, line.op)]
    ours = [ours_ms(one, line.ours) for one in rows]
    others = [other_ms(one, line.op) for one in rows]
    ceilings = [one[line.ours][line.ceiling] for one in rows]
    gains = [theirs / mine for theirs, mine in zip(others, ours, strict=True)]
    over = (geometric_mean(ms / ceiling for ms, ceiling in zip(them, ceilings, strict=True)) for them in (ours, others))
    cells = [
        line.title, str(len(rows)), *(f"{one:.2f}" for one in over),
        f"{min(gains):.2f} to {max(gains):.2f}", str(sum(gain > 1 for gain in gains)),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def table() -> list[str]:
    """All lines."""
    heads = ["operator", "shapes", "ours / ceiling", "best other / ceiling", "best other / ours", "ahead at"]
    return [
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
        *(line_of(one, read(RESULTS / one.file)) for one in LINES),
    ]


def replaced(text: str) -> str:
    """A page with the table as it is now. Raises: ValueError where it has no marks."""
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:start] + "\n" + "\n".join(table()) + "\n" + text[end:]


def main(arguments: Sequence[str]) -> None:
    """Print it, or put it into the README."""
    page = ROOT / "README.md"
    if "--write" in arguments:
        page.write_text(replaced(page.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        sys.stdout.write("\n".join(table()) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
