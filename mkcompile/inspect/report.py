"""What `explain` returns: findings that show themselves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from mkcompile.inspect.console import print_report, terminal
from mkcompile.inspect.findings import Findings
from mkcompile.inspect.page import write_html
from mkcompile.inspect.plain import report_to_dict


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Findings):
    """What `explain` returns. `print()`, `to_dict()` and `to_html(path)` show it."""

    def print(self, console: Console | None = None) -> None:
        """Print tables of what was fused, what was not and why, and the totals."""
        print_report(self, console or terminal())

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return report_to_dict(self)

    def to_html(self, path: str | Path) -> Path:
        """Write one self-contained page; returns its path."""
        return write_html(self, Path(path))
