"""The report as one self-contained page: styles, drawings and the little script are inside; nothing is fetched."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from mkcompile.inspect import units
from mkcompile.inspect.findings import Findings
from mkcompile.inspect.page.view import Page, page_of, prose


def write_html(report: Findings, path: Path) -> Path:
    """Write the page, and the folder that it lies in; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(page_of(report)), encoding="utf-8")
    return path


def render(page: Page) -> str:
    """The page's text."""
    environment = Environment(
        loader=PackageLoader("mkcompile.inspect.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["ms"] = units.time_text
    environment.filters["prose"] = prose
    environment.filters["bytes"] = units.bytes_text
    return environment.get_template("report.html").render(page=page)
