"""`python -m benchmarks.plot_small RESULTS.jsonl FOLDER`: few rows under CUDA graphs, one picture an operator.

One panel a weight: rows across, time over the floor max(cuBLAS GEMM, weight from memory, bytes over the link) + 2.5 us
(the GEMM alone: over cuBLAS), a line a contender.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from . import style
from .report import Key, read

#: In the order of the legend.
_DRAWN = (
    "mkcompile", "mkcompile_direct", "mkcompile_staged", "cublas", "cublas_nccl", "cublas_two_shot", "cublas_one_shot",
)  # fmt: skip
_MOST = 3.0
_BAR = {"gemm": 1 / 0.95}
_USUAL_BAR = 1.2

Found = dict[Key, dict[str, dict[str, float]]]


def panel(axes: Axes, found: Found, keys: list[Key], op: str) -> None:
    """The lines of one weight."""
    names = [name for name in _DRAWN if any(name in found[key] for key in keys)]
    for name in [one for one in names if op == "gemm" or one != "cublas"]:
        rows = [(key[2], found[key][name]["ms"] / found[key][name]["floor_ms"]) for key in keys if name in found[key]]
        (line,) = axes.plot([m for m, _ in rows], [min(y, _MOST) for _, y in rows], marker="o", label=style.label(name))
        line.set(color=style.colour(name), linewidth=2.4 if name.startswith("mkcompile") else 1.2)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.axhline(_BAR.get(op, _USUAL_BAR), color="grey", linewidth=0.8, linestyle="--")
    rows_m = [key[2] for key in keys]
    axes.set_xscale("log", base=2)
    axes.set_xticks(rows_m, [str(m) for m in rows_m], fontsize=8)
    axes.set_title(f"N x K = {keys[0][3]} x {keys[0][4]}", fontsize=10)


def draw(found: Found, op: str, path: Path) -> None:
    """All weights side by side."""
    keys = [key for key in found if key[:2] == ("graph", op)]
    weights = list(dict.fromkeys(key[3:] for key in keys))
    figure, panels = plt.subplots(1, len(weights), figsize=(3.4 * len(weights), 3.4), sharey=True, layout="constrained")
    for axes, weight in zip(panels, weights, strict=True):
        panel(axes, found, sorted(key for key in keys if key[3:] == weight), op)
    panels[0].set_ylabel("time / floor")
    panels[0].set_ylim(0.7, None)
    panels[0].legend(fontsize=8, loc="upper left")
    figure.suptitle(f"{style.TITLES[op]} of few rows, two H200, bfloat16, CUDA graphs", fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(results: str, folder: str) -> None:
    """Draw all."""
    found = read(Path(results))
    Path(folder).mkdir(parents=True, exist_ok=True)
    for op in dict.fromkeys(key[1] for key in found if key[0] == "graph"):
        draw(found, op, Path(folder) / f"{op}_few_rows.png")


if __name__ == "__main__":
    main(*sys.argv[1:3])
