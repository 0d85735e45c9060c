"""`python -m benchmarks.pass_cost`: what the fusion pass costs, on the graphs of Llamas of several depths.

For each depth the post-grad graph (inference, four ranks, sequence parallel, fake process group) is captured once and
rewritten several times. For one depth the whole of Inductor's compilation is measured, too; and both for a small
training step, with its backward graph. Times are processor seconds of this process and its children (the C++ compiler),
so that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache

from benchmarks.llama_graph import example_input, llama
from mkcompile.config import Options
from mkcompile.passes.fuse import fuse
from mkcompile.passes.fusion_pass import FusionPass
from tests.captured import capture, fake_group

WORLD_SIZE = 4
RESULT = Path(__file__).parent / "results" / "cpu" / "pass_cost.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Units: processor seconds; `pass_s` is the median, `fastest_s` the least of the repeats."""

    num_layers: int
    phase: str
    num_nodes: int
    num_collectives: int
    num_fused: int
    pass_s: float
    fastest_s: float
    us_per_node: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The pass within one compilation, caches empty. Units: processor seconds."""

    num_layers: int
    training: bool
    compile_s: float
    pass_s: float
    fraction: float


def processor_s() -> float:
    """Of this process and of children that have ended."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def timed(function: Callable[[], Any]) -> float:
    """Processor seconds of one call."""
    start = processor_s()
    function()
    return processor_s() - start


def rewrite_cost(num_layers: int, group: str, repeats: int, *, training: bool = False) -> list[Cost]:
    """The cost of each graph."""
    costs = []
    with torch.set_grad_enabled(training):
        graphs = capture(llama(num_layers, WORLD_SIZE, group), example_input(WORLD_SIZE), backward=training)
    for graph in graphs:
        copies = [copy.deepcopy(graph.before) for _ in range(repeats + 1)]
        _, *rest = [timed(lambda gm=gm: fuse(gm.graph)) for gm in copies]  # type: ignore[misc]  # the first one warms up
        num_nodes = len(graph.before.graph.nodes)
        costs.append(
            Cost(
                num_layers=num_layers,
                phase=graph.phase,
                num_nodes=num_nodes,
                num_collectives=len(graph.sites),
                num_fused=sum(site.operator is not None for site in graph.sites),
                pass_s=statistics.median(rest),
                fastest_s=min(rest),
                us_per_node=1e6 * statistics.median(rest) / num_nodes,
            )
        )
    return costs


class TimedPass(FusionPass):
    """The pass as Inductor calls it, with the time it took."""

    spent_s = 0.0

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.spent_s += timed(lambda: super(TimedPass, self).__call__(graph))


def share_of_compilation(num_layers: int, group: str, *, training: bool = False) -> Share:
    """Compile with Inductor and our pass."""
    torch._dynamo.reset()
    fusion = TimedPass(Options(fuse="always"))
    model, x = llama(num_layers, WORLD_SIZE, group), example_input(WORLD_SIZE)

    def compile_and_call() -> None:
        y = torch.compile(model, backend="inductor", fullgraph=True)(x)
        if training:
            y.sum().backward()

    patch = inductor_config.patch(post_grad_custom_pre_pass=fusion, compile_threads=1)
    with fresh_cache(), patch, torch.set_grad_enabled(training):
        compile_s = timed(compile_and_call) - fusion.spent_s
    return Share(
        num_layers=num_layers,
        training=training,
        compile_s=compile_s,
        pass_s=fusion.spent_s,
        fraction=fusion.spent_s / compile_s,
    )


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def report(costs: list[Cost], shares: list[Share]) -> dict[str, object]:
    """Everything that is kept, with what it was measured on."""
    return {
        "what": "processor seconds of the fusion pass on graphs of a sequence-parallel Llama, 4 ranks, fake group",
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average": os.getloadavg()[1],
        "graphs": [asdict(cost) for cost in costs],
        "compilations": [asdict(share) for share in shares],
    }


def main() -> None:
    """Measure, and write the result file after each part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--compiled-layers", type=int, default=32)
    parser.add_argument("--training-layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    costs: list[Cost] = []
    shares: list[Share] = []
    with fake_group(WORLD_SIZE) as group:
        parts: list[Callable[[], None]] = [
            *(lambda n=n: costs.extend(rewrite_cost(n, group, options.repeats)) for n in options.layers),  # type: ignore[misc]
            lambda: costs.extend(rewrite_cost(options.training_layers, group, options.repeats, training=True)),
            lambda: shares.append(share_of_compilation(options.training_layers, group, training=True)),
            lambda: shares.append(share_of_compilation(options.compiled_layers, group)),
        ]
        for part in parts:
            part()
            options.out.write_text(json.dumps(report(costs, shares), indent=2) + "\n")


if __name__ == "__main__":
    main()
