"""SVG of the predicted step: as it is above, fused below, on one scale."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import floor, log10

from markupsafe import Markup

from mkcompile.inspect.timeline import Bar, Timeline, Timelines
from mkcompile.inspect.units import time_text

WIDTH, LEFT, RIGHT, LANE, GROUP, TOP = 1180.0, 86.0, 66.0, 26.0, 92.0, 18.0
_LEAST_PIXELS = 0.35


def draw_timelines(both: Timelines, operator_of: Mapping[int, str], phases: Sequence[str]) -> Markup:
    """Two rows of lanes; a fused operator fills both lanes, since it computes and sends at once."""
    end_s = max(both.unfused.end_s, both.fused.end_s, 1e-9)
    scale = (WIDTH - LEFT - RIGHT) / end_s
    height = TOP + 2 * GROUP + 18
    parts = [
        Markup('<svg class="timeline" role="img" aria-label="predicted step" viewBox="0 0 {:.0f} {:.0f}">').format(
            WIDTH, height
        ),
        *_ticks(end_s, scale, height),
    ]
    for index, (name, one) in enumerate((("as it is", both.unfused), ("fused", both.fused))):
        top = TOP + index * GROUP
        parts += _frame(name, one, top, scale)
        parts += _phases(one, phases, top, scale)
        parts += _bars(one, operator_of, top, scale)
    return Markup("").join([*parts, Markup("</svg>")])


def _ticks(end_s: float, scale: float, height: float) -> Iterator[Markup]:
    step = 10 ** floor(log10(end_s))
    step = next(step * part for part in (0.1, 0.2, 0.5, 1.0) if end_s / (step * part) <= 11)
    for i in range(int(end_s / step) + 1):
        x = LEFT + i * step * scale
        yield Markup('<line class="tick" x1="{0:.1f}" x2="{0:.1f}" y1="{1}" y2="{2:.0f}"/>').format(
            x, TOP - 4, height - 14
        )
        yield Markup('<text class="tick" x="{:.1f}" y="{:.0f}">{}</text>').format(
            x, height - 2, f"{i * step * 1e3:g} ms"
        )


def _frame(name: str, one: Timeline, top: float, scale: float) -> Iterator[Markup]:
    yield Markup('<text class="group" x="0" y="{:.0f}">{}</text>').format(top + 16, name)
    for lane, label in enumerate(("compute", "link")):
        y = top + 14 + lane * LANE
        yield Markup('<text class="lane" x="{}" y="{:.0f}">{}</text>').format(LEFT - 8, y + 16, label)
        yield Markup('<rect class="lane" x="{}" y="{:.0f}" width="{:.1f}" height="{}"/>').format(
            LEFT, y, WIDTH - LEFT - RIGHT, LANE - 2
        )
    yield Markup('<text class="end" x="{:.1f}" y="{:.0f}">{}</text>').format(
        LEFT + one.end_s * scale + 6, top + 14 + LANE + 4, time_text(one.end_s)
    )


def _phases(one: Timeline, phases: Sequence[str], top: float, scale: float) -> Iterator[Markup]:
    for index, phase in enumerate(phases):
        bars = [bar for bar in one.bars if bar.graph == index]
        if bars and index < 8:
            x = LEFT + min(bar.start_s for bar in bars) * scale
            yield Markup('<text class="phase" x="{:.1f}" y="{:.0f}">{}</text>').format(x, top + 9, phase)


def _bars(one: Timeline, operator_of: Mapping[int, str], top: float, scale: float) -> Iterator[Markup]:
    for bar in one.bars:
        width = (bar.end_s - bar.start_s) * scale
        if width < _LEAST_PIXELS:
            continue
        y = top + 14 + (LANE if bar.lane == "link" else 0)
        height = 2 * LANE - 2 if bar.lane == "both" else LANE - 2
        yield Markup(
            '<rect class="bar {} {}"{} x="{:.2f}" y="{:.0f}" width="{:.2f}" height="{:.0f}" rx="2">'
            "<title>{}</title></rect>"
        ).format(
            bar.role,
            _kind(bar, operator_of),
            Markup(' data-site="{}"').format(bar.site) if bar.site is not None else "",
            LEFT + bar.start_s * scale,
            y,
            max(width - 0.6, _LEAST_PIXELS),
            height,
            f"{bar.node}: {time_text(bar.end_s - bar.start_s)}",
        )


def _kind(bar: Bar, operator_of: Mapping[int, str]) -> str:
    known = bar.role == "fused" and bar.site is not None and bar.site in operator_of
    return f"op-{operator_of[bar.site]}" if known and bar.site is not None else ""
