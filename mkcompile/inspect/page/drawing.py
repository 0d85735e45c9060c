"""SVG of a neighbourhood."""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from mkcompile.inspect.page.layout import BOX_HEIGHT, BOX_WIDTH, Placed, place
from mkcompile.inspect.page.neighbourhood import Box, Neighbourhood

_MARGIN = 8
_LEAST_SCALE = 0.66
_LABEL_CHARACTERS, _VALUE_CHARACTERS = 19, 24


def draw(area: Neighbourhood, title: str) -> Markup:
    """The boxes with curves between them; hovering over a box shows its whole line."""
    placed = place(area.graph)
    width, height = placed.width + 2 * _MARGIN, placed.height + 2 * _MARGIN
    head = Markup(
        '<svg class="drawing" role="img" aria-label="{}" viewBox="{} {} {:.0f} {:.0f}" width="{:.0f}" '
        'style="min-width:{:.0f}px">'
    ).format(title, -_MARGIN, -_MARGIN, width, height, width, width * _LEAST_SCALE)
    return Markup("").join([head, *_edges(area, placed), *_boxes(area, placed), Markup("</svg>")])


def _edges(area: Neighbourhood, placed: Placed) -> Iterator[Markup]:
    for source, target in area.graph.edges:
        (x0, y0), (x1, y1) = placed.corners[source], placed.corners[target]
        x0, y0, y1 = x0 + BOX_WIDTH, y0 + BOX_HEIGHT / 2, y1 + BOX_HEIGHT / 2
        bend = max((x1 - x0) / 2, 14)
        inside = area.boxes[source].inside and area.boxes[target].inside
        yield Markup('<path class="edge{}" d="M{:.1f} {:.1f}C{:.1f} {:.1f} {:.1f} {:.1f} {:.1f} {:.1f}"/>').format(
            " in" if inside else "", x0, y0, x0 + bend, y0, x1 - bend, y1, x1, y1
        )


def _boxes(area: Neighbourhood, placed: Placed) -> Iterator[Markup]:
    for name, box in area.boxes.items():
        x, y = placed.corners[name]
        yield Markup('<g class="box {}{}" transform="translate({:.1f} {:.1f})"><title>{}</title>').format(
            box.node.role, " in" if box.inside else "", x, y, str(box.node)
        )
        yield Markup('<rect width="{}" height="{}" rx="7"/>').format(BOX_WIDTH, BOX_HEIGHT)
        yield Markup('<text x="10" y="17" class="call">{}</text>').format(_label(box))
        yield Markup('<text x="10" y="31" class="value">{}</text></g>').format(_short(_value(box), _VALUE_CHARACTERS))


def _label(box: Box) -> str:
    if box.node.role == "input":
        return _short(box.node.name, _LABEL_CHARACTERS)
    call = (
        box.node.call.split(".", 1)[-1]
        if box.node.call.startswith(("aten.", "mkcompile.", "prims."))
        else box.node.call
    )
    times = f" \u00d7{box.count}" if box.count > 1 else ""
    return _short(call, _LABEL_CHARACTERS - len(times)) + times


def _value(box: Box) -> str:
    return box.node.value or {"input": "input", "fused": "several results"}.get(box.node.role, box.node.name)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
