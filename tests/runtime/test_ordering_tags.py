"""Every release and acquire between threads that share no barrier names its partner, and the page of pairs knows it."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEVICE = ROOT / "csrc" / "device"
#: The other end of what kernels, the host's proxy and the copy engine tell each other.
HOST = (*(ROOT / "csrc" / "host" / name for name in ("ring.h", "flags.h")), ROOT / "mkcompile/runtime/gather_engine.py")
PAGE = ROOT / "docs" / "memory_ordering.md"
TAG = re.compile(r"(?://|#) pairs-with: (\w+) (release|acquire) \((\w+) -> (\w+)\), scope (cta|gpu|sys)$")
ORDERED = re.compile(
    r"\b(load_acquire_\w+|store_release_\w+|fence_acq_rel_\w+|red_release_\w+|wait_until<\S+>|wait_network<\S+>|wait)\((?!const)"
)
RELAXED = re.compile(r"\b(load_relaxed_\w+|store_relaxed_\w+)\(")
LOOK_BACK = 6


def device_files() -> list[Path]:
    """All but the wrappers themselves."""
    return [path for path in sorted(DEVICE.rglob("*.cuh")) if path.name not in ("ptx.cuh", "sync.cuh")]


def untagged(lines: list[str]) -> list[int]:
    """Numbers of lines with an ordered access and no tag in the comment block above."""
    found = []
    for number, line in enumerate(lines):
        if line.lstrip().startswith("//") or not ORDERED.search(line) or "void wait(" in line:
            continue
        above = lines[max(0, number - LOOK_BACK) : number]
        if not any("// pairs-with:" in other for other in above):
            found.append(number + 1)
    return found


def tags(text: str) -> dict[str, set[tuple[str, str, str, str]]]:
    """Ends of each pair: (release or acquire, from, to, scope)."""
    ends: dict[str, set[tuple[str, str, str, str]]] = defaultdict(set)
    for line in text.splitlines():
        match = TAG.search(line.strip())
        if match:
            name, *end = match.groups()
            ends[name].add((end[0], end[1], end[2], end[3]))
    return ends


def unpaired(ends: dict[str, set[tuple[str, str, str, str]]]) -> list[str]:
    """Names that lack an end, or whose ends differ in roles or scope."""
    wrong = []
    for name, found in ends.items():
        kinds = {end[0] for end in found}
        if kinds != {"release", "acquire"} or len({end[1:] for end in found}) != 1:
            wrong.append(f"{name}: {sorted(found)}")
    return wrong


def all_text() -> str:
    return "\n".join(path.read_text() for path in (*device_files(), *HOST))


@pytest.mark.parametrize("path", device_files(), ids=lambda path: path.name)
def test_every_ordered_access_is_tagged(path: Path) -> None:
    assert not untagged(path.read_text().splitlines()), path


def test_every_tag_has_both_ends_with_one_scope() -> None:
    ends = tags(all_text())
    assert len(ends) >= 6
    assert not unpaired(ends)


def test_every_pair_is_described() -> None:
    page = PAGE.read_text()
    described = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert described == set(tags(all_text()))


def test_relaxed_accesses_say_why() -> None:
    for path in [*device_files(), DEVICE / "sync.cuh"]:
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            if not RELAXED.search(line) or "abort" in line:  # the abort word carries no data
                continue
            above = "\n".join(lines[max(0, number - LOOK_BACK) : number])
            assert "elaxed:" in above, f"{path.name}:{number + 1} gives no reason"


def test_planted_errors_are_found() -> None:
    text = all_text()
    assert untagged(["fence_acq_rel_sys();"]) == [1]
    assert unpaired(tags(text.replace("partial_ready acquire", "other acquire")))
    assert unpaired(
        tags(
            text.replace(
                "entered acquire (signal_role -> signal_role), scope sys",
                "entered acquire (signal_role -> signal_role), scope gpu",
            )
        )
    )
