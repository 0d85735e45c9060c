"""`python -m benchmarks.report benchmarks/results/2xh200/ops.jsonl`: the results as Markdown tables."""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

Key = tuple[str, str, int, int, int]
_LINK_BOUND = 0.9
_APART = ", where the link takes more than 0.9 of the GEMM"


def read(path: Path) -> dict[Key, dict[str, dict[str, float]]]:
    """Rows by (regime, op, m, n, k), then by contender; of several runs the last counts."""
    found: dict[Key, dict[str, dict[str, float]]] = defaultdict(dict)
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found[row["regime"], row["op"], row["M"], row["N"], row["K"]][row["contender"]] = row
    return found


def geometric_mean(values: Iterable[float]) -> float:
    """NaN of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def table(found: dict[Key, dict[str, dict[str, float]]], regime: str, op: str) -> list[str]:
    """Times in milliseconds, each with its ratio to the ceiling."""
    keys = [key for key in found if key[:2] == (regime, op)]
    names = list(dict.fromkeys(name for key in keys for name in found[key]))
    lines = ["| M | N | K | ceiling | " + " | ".join(names) + " |", "| --- " * (4 + len(names)) + "|"]
    ratios: dict[str, list[tuple[Key, float]]] = defaultdict(list)
    linked = {key for key in keys if found[key]["cublas"]["link_ms"] > _LINK_BOUND * found[key]["cublas"]["ms"]}
    for key in keys:
        rows = found[key]
        ceiling = rows["cublas"]["ceiling_ms"]
        cells = []
        for name in names:
            ms = rows[name]["ms"] if name in rows else math.nan
            ratios[name].append((key, ms / ceiling))
            cells.append(f"{ms:.3f} ({ms / ceiling:.2f})")
        lines.append(f"| {key[2]} | {key[3]} | {key[4]} | {ceiling:.3f} | " + " | ".join(cells) + " |")
    for what, counted in (("", set(keys)), (", K >= 2048", {key for key in keys if key[4] >= 2048}), (_APART, linked)):
        means = [geometric_mean(ratio for key, ratio in ratios[name] if key in counted and ratio > 0) for name in names]
        if counted:
            lines.append(f"| geometric mean{what} | | | | " + " | ".join(f"{mean:.3f}" for mean in means) + " |")
    return lines


def main(path: str) -> None:
    """Write all tables."""
    found = read(Path(path))
    for regime, op in dict.fromkeys(key[:2] for key in found):
        sys.stdout.write(f"\n### {op}, {regime}\n\n" + "\n".join(table(found, regime, op)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
