"""Two graphs side by side: equal nodes on one line, long runs of them folded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest

from mkcompile.inspect.snapshot import GraphView, NodeView

# Runs of unchanged lines longer than this are folded, but for the lines next to a change.
FOLD_FROM, CONTEXT = 9, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line: the node on each side, or None where the other side has it alone."""

    before: NodeView | None
    after: NodeView | None

    @property
    def site(self) -> int | None:
        """The site that either side belongs to."""
        sites = [one.site for one in (self.before, self.after) if one is not None and one.site is not None]
        return sites[0] if sites else None

    @property
    def changed(self) -> bool:
        """Is something on this line not on both sides, or part of a site?"""
        return self.before is None or self.after is None or self.site is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Consecutive lines; a folded block is shown on request."""

    lines: tuple[Line, ...]
    folded: bool


def align(before: GraphView, after: GraphView) -> list[Line]:
    """All lines in order. Nodes are the same where their names are."""
    old, new = before.nodes, after.nodes
    matcher = SequenceMatcher(a=[one.name for one in old], b=[one.name for one in new], autojunk=False)
    lines: list[Line] = []
    for _, a0, a1, b0, b1 in matcher.get_opcodes():
        lines.extend(Line(before=a, after=b) for a, b in zip_longest(old[a0:a1], new[b0:b1]))
    return lines


def blocks(lines: list[Line]) -> Iterator[Block]:
    """Fold what lies far from any change."""
    near = [any(one.changed for one in lines[max(i - CONTEXT, 0) : i + CONTEXT + 1]) for i in range(len(lines))]
    start = 0
    for i in range(1, len(lines) + 1):
        if i < len(lines) and near[i] == near[start]:
            continue
        run = tuple(lines[start:i])
        yield Block(lines=run, folded=not near[start] and len(run) >= FOLD_FROM)
        start = i
