"""`python -m benchmarks.models.plot RESULTS.jsonl FOLDER`: one picture a pass and mode, times over ours."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from .. import style
from .cells import CONTENDERS, MODES, Key
from .results import Row, RowKey, read
from .table import OURS, PASSES, cells_of

_CLIP = 2.5


def draw(rows: dict[RowKey, Row], cells: Sequence[Key], which: str, path: Path) -> None:
    """Cells across, a bar for each contender: its time over ours, 1 is the line."""
    ours = [rows[cell, OURS][f"{which}_ms"] for cell in cells]
    names = [name for name in CONTENDERS if name != OURS and any((cell, name) in rows for cell in cells)]
    width = 0.8 / max(len(names), 1)
    figure, axes = plt.subplots(figsize=(max(8.0, 0.55 * len(cells)), 4.2), layout="constrained")
    for i, name in enumerate(names):
        found = [rows.get((cell, name), {}).get(f"{which}_ms") for cell in cells]
        ratios = [0.0 if ms is None else ms / base for ms, base in zip(found, ours, strict=True)]
        places = [at + (i - (len(names) - 1) / 2) * width for at in range(len(cells))]
        heights = [min(ratio, _CLIP) for ratio in ratios]
        axes.bar(places, heights, width, label=style.label(name), color=style.colour(name))
        for place, ratio in zip(places, ratios, strict=True):
            if ratio > _CLIP:
                axes.annotate(f"{ratio:.1f}", (place, _CLIP), ha="center", va="bottom", fontsize=6)
    axes.axhline(1.0, color="black", linewidth=0.8)
    _name_cells(axes, cells)
    axes.set_ylim(0, 1.12 * axes.get_ylim()[1])  # room for the legend
    axes.set_ylabel("time / mkcompile's")
    graphs = ", CUDA graphs" if cells[0][4] == MODES[1] else ""
    axes.set_title(f"{PASSES[which]}{graphs}, two H200, bfloat16", fontsize=10)
    axes.legend(fontsize=8, ncols=len(names), loc="upper right")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _name_cells(axes: Axes, cells: Sequence[Key]) -> None:
    """Sizes at the ticks, models and forms below them, a line between those."""
    axes.set_xticks(range(len(cells)), [f"{batch}x{tokens}" for _, _, batch, tokens, _ in cells], fontsize=7)
    axes.set_xlim(-0.6, len(cells) - 0.4)
    start = 0
    for (model, form), group in groupby(cells, key=lambda cell: cell[:2]):
        count = len(list(group))
        middle = start + (count - 1) / 2
        axes.annotate(
            f"{model}\n{form}", (middle, 0), (0, -20), xycoords=axes.get_xaxis_transform(), textcoords="offset points",
            ha="center", va="top", fontsize=8,
        )  # fmt: skip
        start += count
        axes.axvline(start - 0.5, color="#cbd5e1", linewidth=0.8)


def main(results: str, folder: str) -> None:
    """Draw all."""
    rows = read(Path(results))
    Path(folder).mkdir(parents=True, exist_ok=True)
    for which in PASSES:
        for mode in MODES:
            cells = [c for c in cells_of(rows) if c[4] == mode and f"{which}_ms" in rows.get((c, OURS), {})]
            if cells:
                draw(rows, cells, which, Path(folder) / f"models_{which}_{mode}.png")


if __name__ == "__main__":
    main(*sys.argv[1:3])
