"""`python -m benchmarks.plot RESULTS.jsonl FOLDER`: one picture an operator and regime.

Bars are times over the ceiling, max(cuBLAS GEMM, bytes over the link): 1 is an operator whose communication is free.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from . import style
from .report import Key, geometric_mean, read

_CLIP = 3.0


def draw(found: dict[Key, dict[str, dict[str, float]]], regime: str, op: str, path: Path) -> None:
    """Shapes across, a bar for each contender, its geometric mean in the legend."""
    keys = [key for key in found if key[:2] == (regime, op)]
    hidden = () if op == "gemm" else style.ALONE
    names = [name for name in dict.fromkeys(n for key in keys for n in found[key]) if name not in hidden]
    width = 0.8 / len(names)
    figure, axes = plt.subplots(figsize=(max(8.0, 0.95 * len(keys)), 4.2), layout="constrained")
    for i, name in enumerate(names):
        ratios = [found[key][name]["ms"] / found[key]["cublas"]["ceiling_ms"] for key in keys]
        places = [at + (i - (len(names) - 1) / 2) * width for at in range(len(keys))]
        text = f"{style.label(name)} ({geometric_mean(ratios):.2f})"
        bars = axes.bar(places, [min(one, _CLIP) for one in ratios], width, label=text, color=style.colour(name))
        for bar, ratio in zip(bars, ratios, strict=True):
            if ratio > _CLIP:
                axes.annotate(f"{ratio:.1f}", (bar.get_x() + width / 2, _CLIP), ha="center", va="bottom", fontsize=7)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(keys)), [f"{m}x{n}\nx{k}" for _, _, m, n, k in keys], fontsize=8)
    axes.set_ylim(0, _CLIP + 0.35 if op != "gemm" else 1.3)
    axes.set_ylabel("time / ceiling")
    where = style.machine(int(found[keys[0]]["cublas"]["world"]))
    axes.set_title(f"{style.TITLES[op]}, {where}, bfloat16, {regime} (geometric means in brackets)", fontsize=10)
    axes.legend(fontsize=8, ncols=min(len(names), 4), loc="upper right")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(results: str, folder: str) -> None:
    """Draw all."""
    found = read(Path(results))
    Path(folder).mkdir(parents=True, exist_ok=True)
    for regime, op in dict.fromkeys(key[:2] for key in found):
        draw(found, regime, op, Path(folder) / f"{op}_{regime}.png")


if __name__ == "__main__":
    main(*sys.argv[1:3])
