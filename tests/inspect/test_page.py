"""The HTML report: complete, self-contained, and it works in a real browser."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mkcompile.inspect.page import write_html
from mkcompile.inspect.page.align import align, blocks
from mkcompile.inspect.page.layout import BOX_HEIGHT, BOX_WIDTH, place
from mkcompile.inspect.page.neighbourhood import around
from mkcompile.inspect.page.view import page_of, prose
from mkcompile.inspect.report import Report
from mkcompile.inspect.snapshot import GraphView, NodeView

_BROWSER_DEADLINE_S = 90
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--window-size=1400,2400",
)
DARK = "--blink-settings=preferredColorScheme=0"


@pytest.fixture(scope="module")
def page_file(sequence_report: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sequence_report.to_html(tmp_path_factory.mktemp("page") / "new folder" / "report.html")


def browse(chromium: str, page: Path, work: Path, flags: Sequence[str]) -> str:
    command = [chromium, *_FLAGS, f"--user-data-dir={work / 'profile'}", *flags, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_BROWSER_DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


class _Balance(HTMLParser):
    """Every tag is closed in order; collects ids and the targets of links."""

    VOID = frozenset({"meta", "br", "hr", "img", "input", "link"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: set[str] = set()
        self.links: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        values = dict(attrs)
        if values.get("id"):
            self.ids.add(str(values["id"]))
        if tag == "a":
            self.links.add(str(values["href"]).removeprefix("#"))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag


def test_tags_balance_and_links_lead_somewhere(page_file: Path) -> None:
    parser = _Balance()
    parser.feed(page_file.read_text(encoding="utf-8"))
    assert parser.open == []
    assert {"kept", "step", "sites", "graphs", "site-1"} <= parser.ids
    assert parser.links <= parser.ids


def test_nothing_is_fetched(page_file: Path) -> None:
    text = page_file.read_text(encoding="utf-8")
    assert not re.search(r"https?://|@import|url\(|<link|src=", text)


def test_every_collective_and_node_is_on_the_page(page_file: Path, sequence_report: Report) -> None:
    text = page_file.read_text(encoding="utf-8")
    for one in sequence_report.collectives:
        assert f'id="site-{one.site}"' in text
    for pair in sequence_report.graphs:
        for node in (*pair.before.nodes, *pair.after.nodes):
            assert f'<span class="name">{node.name}</span>' in text


def test_what_the_user_wrote_is_escaped(sequence_report: Report, tmp_path: Path) -> None:
    from dataclasses import replace

    hostile = replace(sequence_report, model="<script>alert(1)</script>")
    assert "<script>alert" not in write_html(hostile, tmp_path / "page.html").read_text(encoding="utf-8")


def test_backticks_become_code_and_the_rest_is_escaped() -> None:
    assert prose("a `b<c>` d") == "A <code>b&lt;c&gt;</code> d."
    assert prose("<i>") == "&lt;i&gt;."


def test_a_browser_runs_the_page_and_draws_it(chromium: str, page_file: Path, tmp_path: Path) -> None:
    """The script sets the theme; the screenshot has the paper's colour and many others."""
    picture = tmp_path / "light.png"
    dom = browse(chromium, page_file, tmp_path, ["--dump-dom", f"--screenshot={picture}"])
    assert 'data-theme="light"' in dom
    assert dom.count("<svg") > 4
    colours = Image.open(picture).convert("RGB").getcolors(1 << 24) or []
    assert max(colours)[1] in {(250, 249, 246), (255, 255, 255)}
    assert len(colours) > 500


def test_a_dark_browser_gets_a_dark_page(chromium: str, page_file: Path, tmp_path: Path) -> None:
    picture = tmp_path / "dark.png"
    browse(chromium, page_file, tmp_path, [DARK, f"--screenshot={picture}"])
    colours = Image.open(picture).convert("RGB").getcolors(1 << 24) or []
    assert max(max(colours)[1]) < 50


def test_a_fused_site_is_drawn_with_its_gemm_before_and_its_operator_after(sequence_report: Report) -> None:
    for rows in sequence_report.sites():
        pair = sequence_report.graphs[rows[0].graph]
        before, after = (around(one, rows[0].site, fused=True) for one in (pair.before, pair.after))
        inside = {box.node.role for box in before.boxes.values() if box.inside}
        assert {"collective", "gemm"} <= inside
        assert next(box.node.role for box in after.boxes.values() if box.inside) == "fused"


def node(name: str, *inputs: str) -> NodeView:
    return NodeView(name=name, role="other", call="f", arguments="", inputs=inputs, shape=(), dtype="")


def test_alike_parts_of_a_split_are_one_box() -> None:
    parts = [node(f"part_{i}", "split") for i in range(8)]
    graph = GraphView(nodes=(node("x"), node("split", "x"), *parts, node("cat", *(one.name for one in parts))))
    area = around(graph.coloured({"split": 1, "cat": 1}), 1, fused=True)
    assert {name: box.count for name, box in area.boxes.items()} == {"x": 1, "split": 1, "part_0": 8, "cat": 1}


names = st.lists(st.sampled_from([f"n{i}" for i in range(40)]), unique=True)


@settings(deadline=None, max_examples=60)
@given(names, names)
def test_each_node_is_on_one_line_of_its_side(old: list[str], new: list[str]) -> None:
    graphs = [GraphView(nodes=tuple(node(name) for name in one)) for one in (old, new)]
    lines = align(*graphs)
    assert [one.before.name for one in lines if one.before] == old
    assert [one.after.name for one in lines if one.after] == new
    assert [line for block in blocks(lines) for line in block.lines] == lines
    assert not any(line.changed for block in blocks(lines) if block.folded for line in block.lines)


@settings(deadline=None, max_examples=60)
@given(st.sets(st.tuples(st.integers(0, 14), st.integers(0, 14)), max_size=40))
def test_boxes_do_not_overlap_and_edges_go_right(pairs: set[tuple[int, int]]) -> None:
    graph = nx.DiGraph((str(min(a, b)), str(max(a, b))) for a, b in pairs if a != b)
    corners = place(graph).corners
    for (x0, y0), (x1, y1) in combinations(corners.values(), 2):
        assert abs(x0 - x1) >= BOX_WIDTH or abs(y0 - y1) >= BOX_HEIGHT
    assert all(corners[a][0] < corners[b][0] for a, b in graph.edges)


def test_a_note_is_headed_by_what_is_true_of_every_note(sequence_report: Report, tmp_path: Path) -> None:
    noted = replace(sequence_report, notes=("ffn has no kernel yet",))
    assert "<h3>Note</h3><p>Ffn has no kernel yet.</p>" in noted.to_html(tmp_path / "page.html").read_text("utf-8")


def test_a_report_with_nothing_in_it_is_a_page(tmp_path: Path) -> None:
    empty = Report(
        model="Linear", torch_version="2", topology="cpu", options="", collectives=(), graphs=(), notes=("no",)
    )
    assert page_of(empty).tiles
    assert "There is no collective to fuse." in write_html(empty, tmp_path / "page.html").read_text(encoding="utf-8")
