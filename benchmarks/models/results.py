"""Rows on disk: JSON lines, appended; of several rows of one contender at one cell the last counts."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .cells import Cell, Key

Row = dict[str, Any]
RowKey = tuple[Key, str]


def key_of(row: Mapping[str, Any]) -> RowKey:
    """Cell and contender."""
    return (row["model"], row["form"], row["B"], row["T"], row["mode"]), row["contender"]


def read(path: Path) -> dict[RowKey, Row]:
    """What is there; nothing where there is no file."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return {key_of(row): row for row in rows}


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Whole lines, also where several processes write."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(text)


def is_done(cell: Cell, contenders: Iterable[str], found: Mapping[RowKey, Row]) -> bool:
    """Is there a whole row for every contender?"""
    return all((cell.key, name) in found and "unfinished" not in found[cell.key, name] for name in contenders)


def with_error(cell: Cell, contenders: Iterable[str], error: str, found: Mapping[RowKey, Row]) -> list[Row]:
    """Rows of a cell that ended early: what was measured before stays, beside the error."""
    key = {"model": cell.model, "form": cell.form, "B": cell.batch, "T": cell.tokens, "mode": cell.mode}
    rows = []
    for name in contenders:
        so_far = found.get((cell.key, name), {})
        known = {k: v for k, v in so_far.items() if k != "unfinished"} if "unfinished" in so_far else {}
        rows.append({**key, "contender": name, "error": error, **known})
    return rows
