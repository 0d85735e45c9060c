"""The demo: two models on ranks of this machine, compiled by both backends, compared, every collective explained."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m mkcompile demo`; the exit status."""
    from mkcompile.demo.run import main as run

    return run(argv)
