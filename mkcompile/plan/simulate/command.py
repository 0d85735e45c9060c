"""`python -m mkcompile simulate`: predicted steps of models, or single operators, as table, JSON and plot."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from mkcompile.errors import MkcompileError
from mkcompile.plan.decide import Policy
from mkcompile.plan.kernels import AVAILABLE
from mkcompile.plan.simulate.layout import Layout, Workload
from mkcompile.plan.simulate.models import MODELS
from mkcompile.plan.simulate.result import SimulationResult, merge
from mkcompile.plan.simulate.run import scaling, simulate
from mkcompile.plan.simulate.sweep import parse_site, sweep
from mkcompile.plan.topology import PRESETS, preset

_BAD_ARGUMENTS = 2
_PLOTS = (".png", ".svg", ".pdf")
_WORTH_TELLING = 0.001


def main(arguments: Sequence[str]) -> int:
    """Run the command; its exit status."""
    options = _parser().parse_args(list(arguments))
    console = Console()
    try:
        found = _operators(options, console) if options.site else _models(options, console)
    except MkcompileError as error:
        Console(stderr=True).print(str(error), style="red", markup=False)
        return _BAD_ARGUMENTS
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
        console.print(f"written: {options.json}", markup=False)
    return 0


def _operators(options: argparse.Namespace, console: Console) -> dict[str, object]:
    machine = preset(options.topology)
    world = options.world or machine.num_gpus
    result = sweep([parse_site(site, world) for site in options.site], machine, _policy(options))
    console.print(result.table())
    return result.to_dict()


def _models(options: argparse.Namespace, console: Console) -> dict[str, object]:
    load = Workload(batch=options.batch, tokens=options.tokens, train=not options.forward)
    names = options.model or ["llama3-70b"]

    def planned(policy: Policy) -> SimulationResult:
        if options.nodes:
            return merge([scaling(name, options.topology, options.nodes, load, policy) for name in names])
        return merge([simulate(name, options.topology, _layout(options), load, policy) for name in names])

    policy = _policy(options)
    merged = planned(policy)
    console.print(merged.table())
    if not options.nodes:
        console.print(merged.operator_table())
    if not options.hypothetical and options.fuse != "never":
        _tell_of_missing(merged, planned(replace(policy, available=None)), console)
    if options.plot is not None:
        merged.plot(options.plot)
        console.print(f"written: {options.plot}", markup=False)
    return merged.to_dict(timeline=options.timeline)


def _policy(options: argparse.Namespace) -> Policy:
    return Policy(fuse=options.fuse, available=None if options.hypothetical else AVAILABLE)


def _tell_of_missing(found: SimulationResult, free: SimulationResult, console: Console) -> None:
    """What kernels that do not exist yet would make of the steps."""
    pairs = [
        (ours.fused_s, theirs.fused_s, ours.topology)
        for ours, theirs in zip(found.rows, free.rows, strict=True)
        if theirs.fused_s < ours.fused_s * (1 - _WORTH_TELLING)
    ]
    if pairs:
        times = "; ".join(f"{there * 1e3:.1f} ms, not {here * 1e3:.1f}, on {name}" for here, there, name in pairs)
        console.print(
            f"Planned with the kernels that exist. With all that the planner knows (--hypothetical): {times}.",
            markup=False,
        )


def _plot_file(text: str) -> Path:
    path = Path(text)
    if path.suffix not in _PLOTS:
        raise argparse.ArgumentTypeError(f"{text!r} must end in {', '.join(_PLOTS)}")
    return path


def _layout(options: argparse.Namespace) -> Layout | None:
    """The layout that was asked for; None where nothing was said, for the default one."""
    degrees = {name: getattr(options, name) for name in ("tensor", "context", "data", "expert")}
    given = {name: degree for name, degree in degrees.items() if degree is not None}
    if not given and options.sequence and options.sharded:
        return None
    return Layout(**given, sequence=options.sequence, sharded=options.sharded)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mkcompile simulate", description=__doc__)
    add = parser.add_argument
    add("--model", action="append", metavar="NAME", help=f"one of {', '.join(MODELS)}; several times for several")
    add("--topology", default="8xh200", metavar="NAME", help=f"one of {', '.join(PRESETS)}")
    add("--nodes", type=int, nargs="+", metavar="N", help="the default layout on this many nodes, for each number")
    add("--tensor", type=int, help="ranks of a tensor-parallel group")
    add("--context", type=int, help="ranks of a context-parallel group")
    add("--data", type=int, help="data-parallel ranks")
    add("--expert", type=int, help="ranks that share the experts")
    add("--no-sequence", dest="sequence", action="store_false", help="all-reduce in place of sequence parallelism")
    add("--replicated", dest="sharded", action="store_false", help="replicate parameters in place of sharding them")
    add("--batch", type=int, default=1, help="sequences for each data-parallel rank")
    add("--tokens", type=int, default=4096, help="tokens of a sequence")
    add("--forward", action="store_true", help="no backward pass")
    add("--fuse", choices=("auto", "always", "never"), default="auto")
    add("--hypothetical", action="store_true", help="plan also with kernels that do not exist yet")
    add("--site", action="append", metavar="OPERATOR:MxNxK", help="predict single operators in place of models")
    add("--world", type=int, help="ranks of the single operators (default: all GPUs)")
    add("--json", type=Path, metavar="FILE")
    add("--timeline", action="store_true", help="put the first model's events into the JSON")
    add("--plot", type=_plot_file, metavar="FILE", help="bars of compute and exposed communication (png, svg, pdf)")
    return parser
