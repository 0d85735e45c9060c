"""`python -m benchmarks.models.table [RESULTS.jsonl]`: the rows as Markdown, and the table in the README.

Each cell of a table is milliseconds; in brackets the time over ours, so that above 1.00 we are ahead.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from mkcompile.config import Settings

from ..report import geometric_mean
from . import bars
from .cells import CONTENDERS, MODELS, MODES, VARIANT, WHOLE, Key
from .results import Row, RowKey, read

OURS = "mkernel"
PASSES = {"fwd": "forward", "fwdbwd": "forward + backward"}
BEGIN, END = "<!-- models: made by python -m benchmarks.models.table -->", "<!-- /models -->"
_NAMES = {"eager": "eager", "inductor": "Inductor", "async_tp": "async TP", OURS: "mkcompile", VARIANT: "variant"}
_EXPOSED = (
    "Exposed: of one step of rank 0, which both GPUs begin at once with all launches queued, forward and forward with "
    "backward; where it is missing, why is said under what failed. Rows up to 87a4b34: of a step as it came, with what "
    "a late host cost, and without launches whose timelines were overwritten. Compiling: both modes have one "
    "compilation."
)
#: What counts as level. Source: the project's bar for rows where nothing can be fused.
LEVEL = 0.01


def cells_of(rows: dict[RowKey, Row]) -> list[Key]:
    """By model, form and mode, then by size."""
    models = [*MODELS, *WHOLE]
    found = dict.fromkeys(key for key, _ in rows)
    return sorted(found, key=lambda cell: (models.index(cell[0]), cell[1], cell[4], cell[2] * cell[3]))


def best_other(rows: dict[RowKey, Row], cell: Key, which: str) -> float:
    """The fastest contender's time but ours; infinite where there is none. Units: milliseconds."""
    times = [rows[cell, name].get(f"{which}_ms") for name in CONTENDERS if name != OURS and (cell, name) in rows]
    return min((one for one in times if one is not None), default=math.inf)


def speed_up(rows: dict[RowKey, Row], cell: Key, which: str) -> float | None:
    """The best other's time over ours, or None where one of both is missing."""
    ours = rows.get((cell, OURS), {}).get(f"{which}_ms")
    other = best_other(rows, cell, which)
    return None if ours is None or other == math.inf else other / ours


def _time(row: Row | None, which: str, ours: float | None) -> str:
    if row is None:
        return ""
    ms = row.get(f"{which}_ms")
    if ms is None:
        return "fails" if "error" in row else ""
    digits = 3 if ms < 10 else 2
    return f"{ms:.{digits}f}" if ours is None else f"{ms:.{digits}f} ({ms / ours:.2f})"


def times_table(rows: dict[RowKey, Row], cells: Sequence[Key], which: str) -> list[str]:
    """Every contender's times, one line a cell."""
    names = [name for name in CONTENDERS if any((cell, name) in rows for cell in cells)]
    lines = ["| model | form | batch x tokens | mode | " + " | ".join(_NAMES[name] for name in names) + " |"]
    lines.append("| --- " * (4 + len(names)) + "|")
    for cell in cells:
        model, form, batch, tokens, mode = cell
        ours = rows.get((cell, OURS), {}).get(f"{which}_ms")
        times = [_time(rows.get((cell, name)), which, None if name == OURS else ours) for name in names]
        if any(times):
            lines.append(f"| {model} | {form} | {batch}x{tokens} | {mode} | " + " | ".join(times) + " |")
    return lines


def details_table(rows: dict[RowKey, Row], cells: Sequence[Key]) -> list[str]:
    """Compile times, memory, exposed communication, what was fused, errors against the reference."""
    lines = [
        "| cell | contender | compile cold / warm s | peak GB | arena GB | exposed us | fused / left | worst error "
        "| losses apart |",
        "| --- " * 9 + "|",
    ]
    for (cell, name), row in rows.items():
        if cell not in cells or name == "eager":
            continue
        cold, warm = (_sum(bars.compiled(rows, (cell, name)), f"compile_{kind}_{{}}_s") for kind in ("cold", "warm"))
        peak = max((row.get(f"{which}_peak_bytes") or 0 for which in PASSES), default=0)
        values = [
            " ".join(str(part) for part in cell), _NAMES[name], f"{cold} / {warm}", f"{peak / 1e9:.2f}",
            f"{row['arena_bytes'] / 1e9:.2f}" if "arena_bytes" in row else "",
            " / ".join("" if (us := exposed_us(row, which)) is None else str(us) for which in PASSES),
            _sites(row),
            f"{row['worst_error']:.1e} ({row['worst_tensor']})" if "worst_error" in row else "",
            str(row.get("losses_from_eager", "")),
        ]  # fmt: skip
        lines.append("| " + " | ".join(values) + " |")
    return lines


def _sites(row: Row) -> str:
    """Fused and left, forward, then forward with backward; the sum of both in rows that have no more."""
    passes = [f"{row[f'{one}_fused']} / {row[f'{one}_left']}" for one in PASSES if f"{one}_fused" in row]
    both = f"{sum(row.get('operators', {}).values())} / {sum(row.get('collectives_left', {}).values())} in all"
    return ", ".join(passes) or both


def exposed_us(row: Row, which: str) -> float | None:
    """Communication of one step that no computation runs beside, between kernels and inside of ours; None: unknown, or
    more than the whole step takes, as in rows of earlier commits.
    """
    between: float | None = row.get(f"{which}_between_us")
    inside: float | None = row.get(f"{which}_inside_us", None if row["contender"] in (OURS, VARIANT) else 0.0)
    if between is None or inside is None or between + inside > row.get(f"{which}_ms", math.inf) * 1e3:
        return None
    return round(between + inside, 1)


def _sum(row: Row, pattern: str) -> str:
    found = [row[pattern.format(which)] for which in PASSES if pattern.format(which) in row]
    return f"{sum(found):.1f}" if found else "-"


def errors_list(rows: dict[RowKey, Row]) -> list[str]:
    """What failed, word for word, and what ran without the CUDA graphs that it was to have."""
    failed = [(cell, name, row["error"]) for (cell, name), row in rows.items() if "error" in row]
    failed += [
        (cell, name, f"{row['cudagraph_skips']} of its graphs are no CUDA graphs")
        for (cell, name), row in rows.items()
        if row.get("cudagraph_skips") and "error" not in row
    ]
    failed += [
        (cell, name, f"{PASSES[which]}, exposed: {row[f'{which}_{kind}']}")
        for (cell, name), row in rows.items()
        for which in PASSES
        for kind in ("exposed_note", "profile_error")
        if f"{which}_{kind}" in row
    ]
    return [f"- {' '.join(str(part) for part in cell)}, {_NAMES[name]}: {error}" for cell, name, error in failed]


def summary_table(rows: dict[RowKey, Row]) -> list[str]:
    """For the README: a line for each model and form, the best other's time over ours as geometric means.

    A mean of some of the sizes names them.
    """
    modes = sorted({cell[4] for cell in cells_of(rows)})
    heads = [_pass_in(which, mode) for mode in modes for which in PASSES]
    lines = ["| model | form | sizes | " + " | ".join(heads) + " | behind |", "| --- " * (4 + len(heads)) + "|"]
    for model, form in dict.fromkeys(cell[:2] for cell in cells_of(rows)):
        cells = [cell for cell in cells_of(rows) if cell[:2] == (model, form)]
        means = [_mean(rows, cells, which, mode) for mode in modes for which in PASSES]
        behind = [
            f"{cell[2]}x{cell[3]} {_pass_in(which, cell[4])} {gain:.2f}"
            for which in PASSES
            for cell in cells
            if (gain := speed_up(rows, cell, which)) is not None and gain < 1 - LEVEL
        ]
        behind += _failed(cell for cell in cells if "error" in rows.get((cell, OURS), {}))
        lines.append(f"| {model} | {form} | {_sizes(cells)} | {' | '.join(means)} | {', '.join(behind) or 'none'} |")
    return lines


def _failed(cells: Iterable[Key]) -> list[str]:
    """Each size once, in however many modes it fails."""
    modes = Counter(f"{cell[2]}x{cell[3]}" for cell in cells)
    return [f"{size} fails" + (", in both modes" if times == len(MODES) else "") for size, times in modes.items()]


def _pass_in(which: str, mode: str) -> str:
    """`forward`, or `forward, CUDA graphs`."""
    return PASSES[which] if mode == MODES[0] else f"{PASSES[which]}, CUDA graphs"


def _mean(rows: dict[RowKey, Row], cells: Sequence[Key], which: str, mode: str) -> str:
    """Of this mode; all of the form's sizes are what a whole mean is of."""
    gains = {
        cell: gain for cell in cells if cell[4] == mode and (gain := speed_up(rows, cell, which)) is not None
    }  # fmt: skip
    if not gains:
        return ""
    mean = f"{geometric_mean(gains.values()):.2f}"
    return mean if _sizes(gains) == _sizes(cells) else f"{mean} ({_sizes(gains)})"


def _sizes(cells: Iterable[Key]) -> str:
    return ", ".join(dict.fromkeys(f"{cell[2]}x{cell[3]}" for cell in sorted(cells, key=lambda one: one[2] * one[3])))


def _behind(rows: dict[RowKey, Row]) -> list[str]:
    """Passes of cells in which another contender is ahead."""
    return [
        f"{bars.name_of(cell)} {name} {gain:.2f}"
        for cell in cells_of(rows)
        for which, name in PASSES.items()
        if (gain := speed_up(rows, cell, which)) is not None and gain < 1 - LEVEL
    ]


def predictions_table(rows: dict[RowKey, Row], predicted: Sequence[Row]) -> list[str]:
    """What `explain` says of a step beside what was measured of it, without and with our kernels."""
    lines = [
        "| model | form | batch x tokens | pass | mode | Inductor, predicted / measured | ours, predicted / measured |"
    ]
    lines.append("| --- " * 7 + "|")
    known = {(row["model"], row["form"], row["B"], row["T"]): row for row in predicted}
    for cell in cells_of(rows):
        said = known.get(cell[:4])
        for which, name in PASSES.items() if said is not None else ():
            assert said is not None
            pairs = [
                f"{said[f'{which}_{kind}_ms']:.2f} / {rows[cell, contender][f'{which}_ms']:.2f}"
                for kind, contender in (("unfused", "inductor"), ("fused", OURS))
                if f"{which}_ms" in rows.get((cell, contender), {})
            ]
            if len(pairs) == 2:
                model, form, batch, tokens, mode = cell
                lines.append(f"| {model} | {form} | {batch}x{tokens} | {name} | {mode} | {' | '.join(pairs)} |")
    return lines


def page(rows: dict[RowKey, Row], predicted: Sequence[Row] = ()) -> str:
    """All tables."""
    some = next(iter(rows.values()))
    head = f"Two {some['device']}, torch {some['torch']}, bf16; medians, milliseconds, the slowest rank's."
    parts = ["# Models", head + " In brackets: over mkcompile's time."]
    asked = bars.lines_of(rows, cells_of(rows), _behind(rows), Settings().arena_bytes)
    parts.append("## Asked and measured\n\n" + "\n".join(asked))
    for which, name in PASSES.items():
        parts.append(f"## {name}\n\n" + "\n".join(times_table(rows, cells_of(rows), which)))
    parts.append(f"## Details\n\n{_EXPOSED}\n\n" + "\n".join(details_table(rows, cells_of(rows))))
    if predicted:
        note = "Rows of few tokens without CUDA graphs are bound by the host, which `explain` leaves out."
        parts.append(f"## Predicted and measured\n\n{note}\n\n" + "\n".join(predictions_table(rows, predicted)))
    errors = errors_list(rows)
    if errors:
        parts.append("## What failed\n\n" + "\n".join(errors))
    return "\n\n".join(parts) + "\n"


def replaced(text: str, lines: Sequence[str]) -> str:
    """The README with a new table between its marks. Raises: ValueError where it has no marks."""
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:start] + "\n" + "\n".join(lines) + "\n" + text[end:]


def with_compile_times(rows: dict[RowKey, Row], compiled: dict[RowKey, Row]) -> dict[RowKey, Row]:
    """Cold and warm compile times, from runs that measured nothing else."""
    told = {key: {name: value for name, value in row.items() if "compile_" in name} for key, row in compiled.items()}
    return {key: {**row, **told.get(key, {})} for key, row in rows.items()}


def main(argv: Sequence[str]) -> None:
    """Write the page beside the results, and the README's table."""
    path = Path(argv[0] if argv else "benchmarks/results/2xh200/models.jsonl")
    rows = with_compile_times(read(path), read(path.with_name(path.stem + "-compile.jsonl")))
    beside = path.with_name(path.stem + "-predicted.jsonl")
    lines = beside.read_text(encoding="utf-8").splitlines() if beside.exists() else []
    predicted = [json.loads(line) for line in lines]
    path.with_suffix(".md").write_text(page(rows, predicted), encoding="utf-8")
    readme = Path("README.md")
    readme.write_text(replaced(readme.read_text(encoding="utf-8"), summary_table(rows)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
