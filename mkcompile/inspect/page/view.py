"""What the template shows, worked out beforehand."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from mkcompile.inspect.findings import Findings, Totals
from mkcompile.inspect.page.align import Block, align, blocks
from mkcompile.inspect.page.drawing import draw
from mkcompile.inspect.page.neighbourhood import around
from mkcompile.inspect.page.timeline_svg import draw_timelines
from mkcompile.inspect.rows import Collective, GraphPair
from mkcompile.inspect.units import bytes_text, percent, time_text

# Drawings of more sites than this make a page that no browser likes; the rest is in the tables.
MOST_DRAWN = 60
_NAMES = {"GEMM", "GEMMS", "FFN", "P2P"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One large number."""

    value: str
    label: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """All collectives that stay for one reason."""

    title: str
    sentence: str
    rows: tuple[Collective, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteView:
    """One site: its rows, and its neighbourhood before and after. `kind` is its style class."""

    number: int
    kind: str
    title: str
    rows: tuple[Collective, ...]
    before: Markup | None
    after: Markup | None

    @property
    def why(self) -> str:
        """The whole sentence of a refusal."""
        return self.head.why

    @property
    def head(self) -> Collective:
        """The first of its collectives."""
        return self.rows[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphText:
    """One graph, aligned."""

    phase: str
    num_before: int
    num_after: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Everything on the page."""

    report: Findings
    tiles: tuple[Tile, ...]
    refused: tuple[Refused, ...]
    sites: tuple[SiteView, ...]
    graphs: tuple[GraphText, ...]
    kinds: dict[int, str]
    operators: tuple[str, ...]
    timeline: Markup | None


def page_of(report: Findings) -> Page:
    """The page of a report."""
    kinds = {rows[0].site: rows[0].operator or "kept" for rows in report.sites()}
    phases = [pair.phase for pair in report.graphs]
    return Page(
        report=report,
        tiles=tuple(_tiles(report)),
        refused=tuple(_refused(report)),
        sites=tuple(_site(report, rows, drawn=i < MOST_DRAWN) for i, rows in enumerate(report.sites())),
        graphs=tuple(_graph(pair) for pair in report.graphs),
        kinds=kinds,
        operators=tuple(sorted(set(kinds.values()) - {"kept"})),
        timeline=draw_timelines(report.timelines, kinds, phases) if report.timelines and report.collectives else None,
    )


def _tiles(report: Findings) -> list[Tile]:
    scale = report.extrapolation
    totals: Totals = scale.total if scale else report.totals
    note = f"{scale.layers} layers, from {scale.compiled} that were compiled" if scale else ""
    tiles = [
        Tile(
            value=f"{totals.fused:.0f} / {totals.collectives:.0f}",
            label="collectives fused",
            note=note or f"into {totals.operators:.0f} operators",
        ),
        Tile(value=bytes_text(totals.sent_bytes), label="sent by each rank", note="one step, at least"),
    ]
    if totals.step_unfused_s:
        step = f"{time_text(totals.step_unfused_s)} → {time_text(totals.step_fused_s)}"
        tiles.append(Tile(value=percent(totals.saving_s, totals.step_unfused_s), label="of the step saved", note=step))
        sites = f"{time_text(totals.unfused_s)} → {time_text(totals.fused_s)}"
        saved = time_text(totals.unfused_s - totals.fused_s)
        tiles.append(Tile(value=saved, label="saved at the fused sites", note=sites))
    return tiles


def _refused(report: Findings) -> list[Refused]:
    by_reason: dict[str, list[Collective]] = {}
    for row in report.refused():
        assert row.reason is not None
        by_reason.setdefault(row.reason.name, []).append(row)
    groups = [
        Refused(title=_title(name), sentence=rows[0].reason.value if rows[0].reason else "", rows=tuple(rows))
        for name, rows in by_reason.items()
    ]
    return sorted(groups, key=lambda group: -len(group.rows))


def _title(name: str) -> str:
    """`NO_GEMM` -> `No GEMM`."""
    words = [word if word in _NAMES else word.lower() for word in name.split("_")]
    return " ".join([words[0] if words[0] in _NAMES else words[0].capitalize(), *words[1:]])


def prose(text: str) -> Markup:
    """A sentence with its capital and full stop, and what stands in backticks as code."""
    whole = text[:1].upper() + text[1:] + ("" if text.endswith(".") or not text else ".")
    parts = whole.split("`")
    return Markup("").join(Markup("<code>{}</code>").format(one) if i % 2 else one for i, one in enumerate(parts))


def _site(report: Findings, rows: list[Collective], *, drawn: bool) -> SiteView:
    head = rows[0]
    pair = report.graphs[head.graph]
    title = " + ".join(dict.fromkeys(row.kind for row in rows))
    before = draw(around(pair.before, head.site, fused=head.fused), f"site {head.site} before") if drawn else None
    after = draw(around(pair.after, head.site, fused=True), f"site {head.site} after") if drawn and head.fused else None
    return SiteView(
        number=head.site, kind=head.operator or "kept", title=title, rows=tuple(rows), before=before, after=after
    )


def _graph(pair: GraphPair) -> GraphText:
    return GraphText(
        phase=pair.phase,
        num_before=len(pair.before),
        num_after=len(pair.after),
        blocks=tuple(blocks(align(pair.before, pair.after))),
    )
