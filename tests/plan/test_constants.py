"""Every constant says how it was got, and the file that it names exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mkcompile.plan.constants import DATA, constants, read

ROOT = Path(__file__).parents[2]
ENTRIES = json.loads(DATA.read_text())


def resolved(name: str) -> str:
    """The source, followed through "as other_name"."""
    source = str(ENTRIES[name]["source"])
    return resolved(source.removeprefix("as ")) if source.startswith("as ") else source


@pytest.mark.parametrize("name", ENTRIES)
def test_source_names_a_file_of_this_repository_or_is_an_assumption(name: str) -> None:
    files = re.findall(r"benchmarks/results/[\w/.-]+\.jsonl?", resolved(name))
    assert all((ROOT / file).exists() for file in files)
    assert files or ENTRIES[name]["how"] == "assumed"


def test_missing_unknown_and_unexplained_entries_are_errors() -> None:
    missing = {name: entry for name, entry in ENTRIES.items() if name != "flag_us"}
    with pytest.raises(ValueError, match="flag_us"):
        read(json.dumps(missing))
    with pytest.raises(ValueError, match="guess"):
        read(json.dumps({**ENTRIES, "guess": ENTRIES["flag_us"]}))
    with pytest.raises(ValueError, match="flag_us needs a source"):
        read(json.dumps({**ENTRIES, "flag_us": {"value": 1, "how": "guessed", "source": ""}}))


def test_fractions_are_fractions() -> None:
    for name in (name for name in ENTRIES if name.endswith("_fraction")):
        assert 0 <= getattr(constants(), name) <= 3 if name == "fill_fraction" else getattr(constants(), name) <= 1


def test_results_say_machine_date_and_units() -> None:
    for path in (ROOT / "benchmarks" / "results" / "2xh200").glob("*.json"):
        if path.name in {
            "ops-baseline.json",
            "small-baseline.json",
            "models-baseline.json",
            "link.json",
            "fused-probe.json",
        }:
            content = json.loads(path.read_text())
            assert content["units"] and content["what"] and content["rows"]
            assert content["machine"]["date"] == "2026-11-29" and content["machine"]["torch"]
