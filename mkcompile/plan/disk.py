"""What outlives a process: the probed topology of a machine, and tuned plans. JSON files under the cache folder.

A file is written beside its place and moved there, so that a reader never sees half of one.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mkcompile.config import settings
from mkcompile.errors import OptionError
from mkcompile.plan.plan import Plan
from mkcompile.plan.topology import Topology

_FORMAT = 1


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(name, path)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def topology_path(machine: str, folder: Path | None = None) -> Path:
    """Where the topology of a machine is kept. `machine` names host, GPUs and versions: the prober's own key."""
    return (folder or settings().cache_dir) / "topology" / f"{_digest(machine)}.json"


def save_topology(machine: str, topology: Topology, folder: Path | None = None) -> Path:
    """Keep what was probed."""
    path = topology_path(machine, folder)
    _write(path, topology.to_json() + "\n")
    return path


def load_topology(machine: str, folder: Path | None = None) -> Topology | None:
    """What was kept, or None. A file of another version counts as none."""
    path = topology_path(machine, folder)
    if not path.exists():
        return None
    try:
        return Topology.from_json(path.read_text())
    except OptionError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One candidate's outcome: seconds (the slowest rank's median), or why it could not run."""

    plan: Plan
    seconds: float | None = None
    error: str = ""

    def to_values(self) -> dict[str, Any]:
        """For JSON."""
        return {"plan": json.loads(self.plan.to_json()), "seconds": self.seconds, "error": self.error}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Measured:
        """The opposite of `to_values`."""
        plan = Plan.from_json(json.dumps(values["plan"]))
        return cls(plan=plan, seconds=values["seconds"], error=values["error"])


@dataclass(slots=True)
class Results:
    """Measured candidates by bucket name (`buckets.entry_name`) and plan name."""

    entries: dict[str, dict[str, Measured]] = field(default_factory=dict)

    def add(self, entry: str, measured: Measured) -> None:
        """Put in or replace."""
        self.entries.setdefault(entry, {})[candidate_name(measured.plan)] = measured

    def has(self, entry: str, plan: Plan) -> bool:
        """Was this candidate tried?"""
        return candidate_name(plan) in self.entries.get(entry, {})

    def best(self, entry: str) -> Measured | None:
        """The fastest candidate that ran; the unfused one wins ties."""
        ran = [one for one in self.entries.get(entry, {}).values() if one.seconds is not None]
        return min(ran, key=lambda one: (one.seconds, one.plan.fused, one.plan.to_json()), default=None)

    def plans(self) -> dict[str, Plan]:
        """The best plan of every bucket."""
        found = {entry: self.best(entry) for entry in sorted(self.entries)}
        return {entry: best.plan for entry, best in found.items() if best is not None}

    def to_json(self) -> str:
        """Canonical text."""
        entries = {
            entry: [candidates[name].to_values() for name in sorted(candidates)]
            for entry, candidates in self.entries.items()
        }
        return json.dumps({"format": _FORMAT, "entries": entries}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Results:
        """Raises: ValueError for text of another format."""
        values = json.loads(text)
        if values.get("format") != _FORMAT:
            raise ValueError(f"tuning results have format {values.get('format')}, not {_FORMAT}")
        results = cls()
        for entry, candidates in values["entries"].items():
            for one in candidates:
                results.add(entry, Measured.from_values(one))
        return results


def candidate_name(plan: Plan) -> str:
    """What tells the candidates of one bucket apart."""
    return f"{plan.name}/{plan.digest()}"


def results_path(topology: Topology, folder: Path | None = None) -> Path:
    """Where measurements on this topology with these versions of driver, CUDA and torch are kept; those on one node do
    not depend on its network.
    """
    versions = json.dumps(dict(topology.versions), sort_keys=True)
    key = topology.key() if topology.num_nodes > 1 else topology.node_key()
    return (folder or settings().cache_dir) / "tune" / f"{_digest(key + versions)}.json"


def save_results(topology: Topology, results: Results, folder: Path | None = None) -> Path:
    """Keep all of them."""
    path = results_path(topology, folder)
    _write(path, results.to_json() + "\n")
    return path


def load_results(topology: Topology, folder: Path | None = None) -> Results:
    """What was kept of this topology and of one of its nodes; nothing where there is no file, or one of another format.

    A group lies inside a node or not, and its entries' names tell: what was measured on one node alone comes first.
    """
    found = _read_results(results_path(replace(topology, num_nodes=1), folder))
    if topology.num_nodes > 1:
        found.entries = {**_read_results(results_path(topology, folder)).entries, **found.entries}
    return found


def _read_results(path: Path) -> Results:
    if not path.exists():
        return Results()
    try:
        return Results.from_json(path.read_text())
    except (ValueError, KeyError, TypeError):
        return Results()
