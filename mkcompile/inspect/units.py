"""Numbers as people read them."""

from __future__ import annotations


def time_text(seconds: float | None) -> str:
    """`1.23 ms`, `45.6 us`, `4.68 s`; `-` for None."""
    if seconds is None:
        return "-"
    if abs(seconds) >= 1:
        return f"{seconds:.2f} s"
    if abs(seconds) >= 1e-3 or seconds == 0:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds * 1e6:.1f} us"


def bytes_text(count: float) -> str:
    """`1.5 GB`, decimal units."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def percent(part: float, whole: float) -> str:
    """`12.3%`; `-` where the whole is zero."""
    return f"{100 * part / whole:.1f}%" if whole else "-"
