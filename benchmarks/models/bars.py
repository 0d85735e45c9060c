"""What the project asked of whole models, beside what was measured: the first table of the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..report import geometric_mean
from .cells import MODES, Key
from .results import Row, RowKey

OURS = "mkernel"
_MODEL = "70B-tp8-local"
#: Tokens, mode, pass, milliseconds at most, and what the others took in the baselines. Source: models-baseline.json.
TIMES = (
    ((4, 4096), MODES[0], "fwd", 12.5, "async TP 13.80, Inductor 15.02"),
    ((4, 4096), MODES[0], "fwdbwd", 39.0, "async TP 42.43, Inductor 44.69"),
    ((1, 512), MODES[1], "fwd", 0.62, "Inductor 0.757"),
    ((1, 2048), MODES[1], "fwd", 1.8, "Inductor 2.166"),
)
_PASSES = {"fwd": "forward", "fwdbwd": "forward + backward"}
#: Above Inductor's time for compiling; of the first loss, between two curves in bf16.
COMPILE_FACTOR, LOSSES_APART = 1.2, 1e-3

Line = tuple[str, str, str]


def lines_of(rows: dict[RowKey, Row], cells: Sequence[Key], behind: Sequence[str], arena_bytes: int) -> list[str]:
    """Markdown; times stand beside Inductor's of the same run. `behind`: passes of cells where another contender is
    more than one in a hundred ahead.

    Units: `arena_bytes` bytes that symmetric memory may take.
    """
    found = [*_times(rows), _ahead(rows, cells, behind), _under_graphs(rows, cells)]
    found += [_memory(rows, cells, arena_bytes), _losses(rows, cells), _compiling(rows, cells)]
    lines = ["| asked | measured | |", "| --- | --- | --- |"]
    return [*lines, *(f"| {asked} | {measured} | {verdict} |" for asked, measured, verdict in found)]


def _times(rows: dict[RowKey, Row]) -> Iterator[Line]:
    for (batch, tokens), mode, which, limit_ms, others in TIMES:
        cells = {form: (_MODEL, form, batch, tokens, mode) for form in ("all-reduce", "sequence")}
        each = {form: rows.get((cell, OURS), {}).get(f"{which}_ms") for form, cell in cells.items()}
        known = {form: ms for form, ms in each.items() if ms is not None}
        theirs = {form: rows.get((cells[form], "inductor"), {}).get(f"{which}_ms") for form in known}
        verdict = "met" if known and max(known.values()) <= limit_ms else "missed"
        if known and verdict == "missed" and min(known.values()) <= limit_ms:
            verdict = "met in one form"
        asked = f"{_MODEL} {batch}x{tokens} {mode}, {_PASSES[which]}: {limit_ms} ms ({others})"
        yield asked, ", ".join(f"{form} {_beside(ms, theirs[form])}" for form, ms in known.items()) or "-", verdict


def _beside(ours_ms: float, theirs_ms: float | None) -> str:
    return f"{ours_ms:.3f}" + ("" if theirs_ms is None else f" beside {theirs_ms:.3f}")


def _ahead(rows: dict[RowKey, Row], cells: Sequence[Key], behind: Sequence[str]) -> Line:
    measured = sum(f"{which}_ms" in rows.get((cell, OURS), {}) for cell in cells for which in _PASSES)
    text = f"{measured - len(behind)} of {measured} passes" + (f"; behind: {'; '.join(behind)}" if behind else "")
    return "ahead of the best other contender, or within 1 %", text, "missed" if behind else "met"


def _under_graphs(rows: dict[RowKey, Row], cells: Sequence[Key]) -> Line:
    graphs = [cell for cell in cells if cell[4] == MODES[1] and (cell, OURS) in rows]
    failed = [cell for cell in graphs if "error" in rows[cell, OURS] or rows[cell, OURS].get("cudagraph_skips")]
    text = f"{len(graphs) - len(failed)} of {len(graphs)} cells" + "".join(f"; {name_of(cell)}" for cell in failed)
    return "works under CUDA graphs", text, "missed" if failed else "met"


def _memory(rows: dict[RowKey, Row], cells: Sequence[Key], arena_bytes: int) -> Line:
    """What our operators hold beside the allocator's is under the cap by itself; the sum is compared."""
    above = {
        cell: max(_peak(rows[cell, OURS], which) - _peak(rows[cell, "inductor"], which) for which in _PASSES)
        + rows[cell, OURS].get("arena_bytes", 0)
        for cell in cells
        if (cell, OURS) in rows and (cell, "inductor") in rows
    }
    if not above:
        return "peak memory above Inductor's at most by the arena's cap", "-", "unknown"
    most = max(above, key=lambda cell: above[cell])
    text = f"most: {above[most] / 1e9:.2f} GB of {arena_bytes / 1e9:.2f}, {name_of(most)}"
    return "peak memory above Inductor's at most by the arena's cap", text, _met(above[most] <= arena_bytes)


def _peak(row: Row, which: str) -> int:
    return row.get(f"{which}_peak_bytes") or 0


def _losses(rows: dict[RowKey, Row], cells: Sequence[Key]) -> Line:
    asked = "20 training steps: losses as Inductor's"
    apart = {}
    for cell in cells:
        ours, theirs = (rows.get((cell, name), {}).get("losses") for name in (OURS, "inductor"))
        if ours and theirs:
            apart[cell] = max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / abs(theirs[0])
    if not apart:
        return asked, "-", "unknown"
    most = max(apart, key=lambda cell: apart[cell])
    text = f"{len(apart)} cells, at most {apart[most]:.1e} of the first loss apart, {name_of(most)}"
    return asked, text, _met(apart[most] <= LOSSES_APART)


def _compiling(rows: dict[RowKey, Row], cells: Sequence[Key]) -> Line:
    """Pairs compile side by side, and one row's time depends on what others do meanwhile: the mean of all decides."""
    asked = f"compile time at most {COMPILE_FACTOR} of Inductor's, geometric means"
    said, means = [], []
    for kind in ("cold", "warm"):
        factors = {}
        for cell in cells:
            ours, theirs = (_seconds(rows.get((cell, name), {}), kind) for name in (OURS, "inductor"))
            if ours and theirs:
                factors[cell] = ours / theirs
        if factors:
            most = max(factors, key=lambda cell: factors[cell])
            means.append(geometric_mean(factors.values()))
            said.append(f"{kind} {means[-1]:.2f} of {len(factors)}, at most {factors[most]:.2f} ({name_of(most)})")
    if not means:
        return asked, "-", "unknown"
    return asked, "; ".join(said), _met(max(means) <= COMPILE_FACTOR)


def _seconds(row: Row, kind: str) -> float:
    return float(sum(row.get(f"compile_{kind}_{which}_s", 0.0) for which in _PASSES))


def compiled(rows: dict[RowKey, Row], key: RowKey) -> Row:
    """The row that says what compiling took: that of the mode in which it was compiled."""
    (model, form, batch, tokens, _), name = key
    row = rows[key]
    return rows.get(((model, form, batch, tokens, row["compiled_in"]), name), {}) if "compiled_in" in row else row


def _met(is_met: bool) -> str:
    return "met" if is_met else "missed"


def name_of(cell: Key) -> str:
    """As a user would ask for it."""
    model, form, batch, tokens, mode = cell
    return f"{model} {form} {batch}x{tokens} {mode}"
