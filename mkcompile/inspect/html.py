"""The report as one self-contained page."""

from __future__ import annotations

from pathlib import Path

from mkcompile.inspect.report import Report


def write_html(report: Report, path: Path) -> Path:
    """Write the page; returns its path."""
    raise NotImplementedError
