"""A report as plain JSON values."""

from __future__ import annotations

from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from mkcompile.inspect.findings import Findings
from mkcompile.inspect.rows import Collective, GraphPair


def plain(value: Any) -> Any:
    """Dataclasses as dicts, enums by name, tuples as lists, paths as strings."""
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def report_to_dict(report: Findings) -> dict[str, Any]:
    """The report's JSON form: graphs are readable text, one line a node."""
    return {
        "model": report.model,
        "torch": report.torch_version,
        "topology": report.topology,
        "options": report.options,
        "capture_s": report.capture_s,
        "totals": {**asdict(report.totals), "saving_s": report.totals.saving_s},
        "extrapolation": plain(report.extrapolation),
        "collectives": [_collective(one) for one in report.collectives],
        "breaks": [{**plain(one), "sentence": one.sentence} for one in report.breaks],
        "graphs": [_graph(one) for one in report.graphs],
        "notes": list(report.notes),
    }


def _collective(one: Collective) -> dict[str, Any]:
    values: dict[str, Any] = plain(one)
    values["why"] = one.why
    if one.estimate is not None:
        values["estimate"]["saving_s"] = one.estimate.saving_s
    return values


def _graph(pair: GraphPair) -> dict[str, Any]:
    return {
        "phase": pair.phase,
        "before": str(pair.before).splitlines(),
        "after": str(pair.after).splitlines(),
    }
