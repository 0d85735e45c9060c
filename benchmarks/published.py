"""Our predictions for two nodes of eight H200 beside what was published for them: `python -m benchmarks.published`.

Prints the tables of docs/across_nodes.md; `--write` puts them there. Nothing of it was measured by us.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mkcompile.ops.problem import Problem
from mkcompile.plan import PRESETS, Policy, Span, decide
from mkcompile.plan.collective_cost import nccl_us
from mkcompile.plan.constants import constants
from mkcompile.plan.gemm_cost import elementwise_us
from mkcompile.plan.kernels import AVAILABLE
from mkcompile.plan.simulate.pieces import Attention, ExpertLayer

ROOT = Path(__file__).parent.parent
PUBLISHED = ROOT / "benchmarks" / "results" / "published" / "mkernel-2x8h200.json"
PAGE = ROOT / "docs" / "across_nodes.md"
BEGIN, END = "<!-- made by `python -m benchmarks.published --write` -->", "<!-- end -->"

MACHINE = PRESETS["2x8xh200"]
WORLD = MACHINE.num_gpus
SPAN = Span(num_nodes=2, per_node=8)
_BYTES = 2
NETWORKS = ("efa", "connectx7")
#: As `simulate` plans, and as it does with `--hypothetical`.
EXISTING, ALL = Policy(available=AVAILABLE), Policy()
UNPLANNED = ("moe_dispatch_gemm", "ring_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Of one site. Units: FLOPs of one GPU, microseconds."""

    flops: float
    unfused_us: float
    fused_us: float
    is_fused: bool

    @property
    def rates(self) -> tuple[float, float]:
        """Unfused and fused. Units: TFLOP/s a GPU."""
        return self.flops / self.unfused_us * 1e-6, self.flops / self.fused_us * 1e-6


def predict(operator: str, size: int, policy: Policy = ALL) -> Predicted:
    """As the planner decides it, or as the simulation costs what has no plan yet."""
    if operator == "moe_dispatch_gemm":
        return _dispatch(size)
    if operator == "ring_attention":
        return _ring(size)
    n, k = (size // WORLD, size) if operator == "all_gather_gemm" else (size, size // WORLD)
    one = Problem(operator=operator, m=size, n=n, k=k, world_size=WORLD, dtype="bfloat16", dtype_bytes=_BYTES)
    found = decide(one, MACHINE, policy)
    assert found.fused_s is not None
    is_fused = found.refusal is None
    return Predicted(flops=one.flops, unfused_us=found.unfused_s * 1e6, fused_us=found.fused_s * 1e6, is_fused=is_fused)


def _dispatch(tokens: int) -> Predicted:
    rows, hidden, width = tokens // WORLD * 8, 7168, 2048
    layer = ExpertLayer(rows=rows, top_k=8, local_experts=256 // WORLD, hidden=hidden, intermediate=width, span=SPAN)
    product_us = layer.gemm_us(width, hidden, MACHINE, 1)
    moved = float(rows * hidden * _BYTES)
    exchange_us = nccl_us("all_to_all", moved, SPAN, MACHINE, constants())
    unfused_us = product_us + exchange_us + elementwise_us(2 * moved, MACHINE.gpu, constants())
    fused_us, _ = layer.fused_us(MACHINE, product_us)
    flops = 2.0 * rows * hidden * width
    return Predicted(flops=flops, unfused_us=unfused_us, fused_us=fused_us, is_fused=fused_us < unfused_us)


def _ring(tokens: int) -> Predicted:
    batch, heads, width = 4, 16, 128
    flops = 4.0 * batch * heads * width * tokens * tokens / WORLD
    kv_bytes = float(batch * tokens * heads * 2 * width * _BYTES)
    alone_us = flops / (MACHINE.gpu.peak_tflops * 1e6 * constants().attention_fraction) + constants().gemm_launch_us
    attention = Attention(flops=flops, kv_bytes=kv_bytes, span=SPAN)
    unfused_us, fused_us, _ = attention.times_us(MACHINE, alone_us, kv_bytes)
    return Predicted(flops=flops, unfused_us=unfused_us, fused_us=fused_us, is_fused=fused_us < unfused_us)


def published() -> dict[tuple[str, int], dict[str, tuple[float, float]]]:
    """Operator and size -> network -> unfused and fused TFLOP/s."""
    text: dict[str, Any] = json.loads(PUBLISHED.read_text())
    found: dict[tuple[str, int], dict[str, tuple[float, float]]] = {}
    for row in (*text["rows"], *text["other_rows"]):
        place = found.setdefault((row["operator"], row["size"]), {})
        place[row["network"]] = (row["unfused_tflops"], row["fused_tflops"])
    return found


def lines() -> Iterator[str]:
    """The table, a line each."""
    yield "| operator | size | EFA (figure 5) | ConnectX-7 (figure 6) | ours | decision | with kernels to come |"
    yield "|---|---|---|---|---|---|---|"
    before = ""
    for (operator, size), networks in published().items():
        cells = [str(size), *(_cell(*networks[name]) if name in networks else "" for name in NETWORKS)]
        name = "" if operator == before else operator
        before = operator
        yield f"| {' | '.join([name, *cells, *_ours(operator, size)])} |"


def _ours(operator: str, size: int) -> tuple[str, str, str]:
    """With the kernels that exist, what is decided, and with all that the planner knows."""
    free = _cell(*predict(operator, size).rates)
    if operator in UNPLANNED:
        return "", "no kernel", free
    ours = predict(operator, size, EXISTING)
    cell = _cell(*ours.rates)
    return cell, "fused" if ours.is_fused else "unfused", "" if cell == free else free


def _cell(unfused: float, fused: float) -> str:
    return f"{unfused:.0f} / {fused:.0f} ({fused / unfused:.2f})"


def with_table(page: str) -> str:
    """The page with the table as it is now."""
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n" + "\n".join(lines()) + f"\n{END}" + rest.partition(END)[2]


def main(arguments: Sequence[str]) -> int:
    """Print, or write into the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.relative_to(ROOT)}")
    if parser.parse_args(list(arguments)).write:
        PAGE.write_text(with_table(PAGE.read_text()))
    else:
        sys.stdout.write("\n".join(lines()) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
