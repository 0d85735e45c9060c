"""Pages of the documentation lead somewhere: every relative link and anchor, every file and function that they name."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from mkcompile.config import option_names, setting_names

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md"))]
SOURCES = [
    path for room in ("mkcompile", "csrc", "benchmarks", "tests", "tools") for path in (ROOT / room).rglob("*.*")
]


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@cache
def anchors(page: Path) -> frozenset[str]:
    """Of a page's headings, as GitHub makes them."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.append(re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-"))
    return frozenset(found)


def is_there(page: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    there = (page.parent / path).resolve() if path else page
    return there.exists() and (not anchor or anchor in anchors(there))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_what_is_there(page: Path) -> None:
    targets = re.findall(r'\]\(([^)\s]+)\)|<img src="([^"]+)"', prose(page))
    relative = [one or other for one, other in targets if not (one or other).startswith(("http:", "https:"))]
    assert [target for target in relative if not is_there(page, target)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_and_functions_that_a_page_names_exist(page: Path) -> None:
    text = re.sub(r"\s+", " ", prose(page))
    paths = re.findall(r"`((?:mkcompile|csrc|tests|benchmarks|docs|examples|tools)/[\w./-]+\.\w+)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    named = re.findall(r"`((?:[\w-]+/)*[\w-]+\.(?:py|cuh|h|cc)): (\w+)(?:\.\w+)?`", text)
    assert [f"{file}: {name}" for file, name in named if not defines(file, name)] == []


def defines(file: str, name: str) -> bool:
    """Does a file of this name define that function, class or constant?"""
    pattern = re.compile(
        rf"^\s*(?:(?:def|class|struct|enum) {name}\b|MK_DEVICE [^\n=;]*\b{name}\(|{name}\b[^\n]* = )", re.M
    )
    paths = [path for path in SOURCES if f"/{path.as_posix()}".endswith(f"/{file}")]
    return any(pattern.search(path.read_text(encoding="utf-8")) for path in paths)


def test_all_settings_and_options_stand_in_their_tables() -> None:
    settings = re.findall(r"^\| `MKCOMPILE_(\w+)` \|", (ROOT / "docs" / "runtime.md").read_text(), flags=re.MULTILINE)
    assert [name.lower() for name in settings] == setting_names()
    options = re.findall(r"^\| `(mkernel\.\w+)` \|", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert options == option_names()


def test_every_decision_stands_in_the_list() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"^- \[\d+\]\(([\w-]+\.md)\)", (folder / "README.md").read_text(), flags=re.MULTILINE)
    assert listed == sorted(path.name for path in folder.glob("[0-9]*.md"))
