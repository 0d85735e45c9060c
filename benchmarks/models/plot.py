"""`python -m benchmarks.models.plot RESULTS.jsonl FOLDER`: one picture a pass and mode, times over ours."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .cells import CONTENDERS, MODES, Key
from .results import Row, RowKey, read
from .table import OURS, PASSES, cells_of

_CLIP = 2.5


def draw(rows: dict[RowKey, Row], cells: Sequence[Key], which: str, path: Path) -> None:
    """Cells across, a bar for each contender: its time over ours, 1 is the line."""
    ours = [rows[cell, OURS][f"{which}_ms"] for cell in cells]
    names = [name for name in CONTENDERS if name != OURS and any((cell, name) in rows for cell in cells)]
    width = 0.8 / max(len(names), 1)
    figure, axes = plt.subplots(figsize=(max(8.0, 0.7 * len(cells)), 4.4), layout="constrained")
    for i, name in enumerate(names):
        found = [rows.get((cell, name), {}).get(f"{which}_ms") for cell in cells]
        ratios = [0.0 if ms is None else ms / base for ms, base in zip(found, ours, strict=True)]
        places = [at + (i - (len(names) - 1) / 2) * width for at in range(len(cells))]
        axes.bar(places, [min(ratio, _CLIP) for ratio in ratios], width, label=name)
        for place, ratio in zip(places, ratios, strict=True):
            if ratio > _CLIP:
                axes.annotate(f"{ratio:.1f}", (place, _CLIP), ha="center", va="bottom", fontsize=6)
    axes.axhline(1.0, color="black", linewidth=0.8)
    labels = [f"{model}\n{form}\n{batch}x{tokens}" for model, form, batch, tokens, _ in cells]
    axes.set_xticks(range(len(cells)), labels, fontsize=6, rotation=60)
    axes.set_ylabel("time / mkcompile's")
    axes.set_title(f"{PASSES[which]}, two H200, bfloat16, {cells[0][4]} mode", fontsize=10)
    axes.legend(fontsize=8, ncols=len(names))
    figure.savefig(path, dpi=110)
    plt.close(figure)


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
