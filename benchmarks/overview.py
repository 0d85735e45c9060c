"""`python -m benchmarks.overview FOLDER`: the README's pictures, from the results in FOLDER (such as results/2xh200).

`plots/one_shape.png`: what one all-reduce takes with its GEMM, by contender. `plots/overview.png`: at each shape of the
three operators ours and the best of all others, over the ceiling max(cuBLAS GEMM, bytes over the link).
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from . import style
from .report import Key, geometric_mean, read

Rows = dict[str, dict[str, float]]

#: Long operators, each contender at its own heat: reductions, and gathers.
NEWEST, GATHERS = "ops_bc9d8a3.jsonl", "ops_c978b4e.jsonl"
#: The operator, its file, and which of our lines stands for it: the output that every caller can have.
PANELS = (
    ("gemm_reduce_scatter", NEWEST, "mkcompile"),
    ("gemm_all_reduce", NEWEST, "mkcompile_staged"),
    ("all_gather_gemm", GATHERS, "mkcompile"),
)
ONE_SHAPE: Key = ("sustained", "gemm_all_reduce", 8192, 8192, 3584)
_CLIP = 3.0


def ours_ms(rows: Rows, name: str) -> float:
    """Our time. A launch that was timed twice in a round, also by its variant's name, has the slower of both times."""
    variant = f"{name}_{str(rows[name].get('variant', '')).partition(' ')[0]}"
    return max(rows[one]["ms"] for one in (name, variant) if one in rows)


def best_other_ms(rows: Rows) -> float:
    """The fastest that is not ours and does the same work; the GEMM alone does not."""
    return min(row["ms"] for name, row in rows.items() if name not in style.ALONE and not name.startswith("mkcompile"))


def panel(axes: Axes, found: dict[Key, Rows], op: str, name: str) -> None:
    """Shapes across, a line from ours to the best other."""
    keys = [key for key in found if key[:2] == ("sustained", op)]
    ceilings = [found[key]["cublas"]["ceiling_ms"] for key in keys]
    ours = [ours_ms(found[key], name) / ceiling for key, ceiling in zip(keys, ceilings, strict=True)]
    others = [best_other_ms(found[key]) / ceiling for key, ceiling in zip(keys, ceilings, strict=True)]
    places = list(range(len(keys)))
    axes.axhspan(0, 1, color="#f1f5f9", zorder=0)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.vlines(places, ours, [min(one, _CLIP) for one in others], color="#cbd5e1", linewidth=3, zorder=1)
    for ratios, text, color, marker in (
        (others, "best other", style.COLLECTIVE, "s"),
        (ours, "mkcompile", style.OURS, "o"),
    ):
        shown = [min(one, _CLIP) for one in ratios]
        axes.scatter(places, shown, s=42, color=color, marker=marker, label=f"{text} ({geometric_mean(ratios):.2f})")
    axes.set_xticks(places, [f"{m}\n{n}\n{k}" for _, _, m, n, k in keys], fontsize=7)
    axes.set_ylim(0.8, _CLIP)
    axes.set_title(style.TITLES[op], fontsize=11)
    axes.legend(fontsize=9, loc="upper right")


def draw_overview(folder: Path, path: Path) -> None:
    """All panels side by side."""
    figure, panels = plt.subplots(1, len(PANELS), figsize=(14.5, 3.8), sharey=True, layout="constrained")
    for axes, (op, file, name) in zip(panels, PANELS, strict=True):
        panel(axes, read(folder / file), op, name)
    panels[0].set_ylabel("time / max(GEMM alone, link alone)")
    panels[0].set_xlabel("M, N, K from top to bottom", fontsize=8, loc="left")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_one_shape(folder: Path, path: Path) -> None:
    """Bars of microseconds: what the GEMM takes alone, and what its collective adds."""
    rows = read(folder / NEWEST)[ONE_SHAPE]
    gemm_us = rows["cublas"]["ms"] * 1e3
    names = ["mkcompile_staged", "cublas_two_shot", "cublas_nccl"]
    figure, axes = plt.subplots(figsize=(9.5, 2.2), layout="constrained")
    for place, name in enumerate(names):
        us = rows[name]["ms"] * 1e3
        ours = name == "mkcompile_staged"
        axes.barh(place, gemm_us, color=style.OURS if ours else style.GEMM, height=0.62)
        axes.barh(place, us - gemm_us, left=gemm_us, color=style.OURS if ours else style.COLLECTIVE, height=0.62)
        axes.text(us + 8, place, f"{us:.0f} us", va="center", fontsize=10)
        inside = "GEMM and all-reduce at once" if ours else "GEMM"
        axes.text(gemm_us / 2, place, inside, ha="center", va="center", color="white", fontsize=9)
        if not ours:
            axes.text((us + gemm_us) / 2, place, "all-reduce", ha="center", va="center", fontsize=9)
    axes.axvline(gemm_us, color="black", linewidth=0.8, linestyle="--")
    axes.text(gemm_us - 6, len(names) - 0.55, f"GEMM alone {gemm_us:.0f} us", ha="right", va="bottom", fontsize=9)
    axes.set_yticks(range(len(names)), ["mkcompile", "cuBLAS, two-shot", "cuBLAS, NCCL"])
    axes.set_xticks([])
    axes.set_ylim(-0.5, len(names) - 0.2)
    axes.set_xlim(0, max(rows[name]["ms"] for name in names) * 1e3 * 1.08)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(folder: str) -> None:
    """Draw both."""
    plots = Path(folder) / "plots"
    plots.mkdir(parents=True, exist_ok=True)
    draw_overview(Path(folder), plots / "overview.png")
    draw_one_shape(Path(folder), plots / "one_shape.png")


if __name__ == "__main__":
    main(*sys.argv[1:2])
