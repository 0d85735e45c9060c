"""`python -m mkcompile simulate`: predicted steps of models, or single operators, as table, JSON and plot."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from mkcompile.errors import MkcompileError
from mkcompile.plan.decide import Policy
from mkcompile.plan.simulate.layout import Layout, Workload
from mkcompile.plan.simulate.models import MODELS
from mkcompile.plan.simulate.result import SimulationResult, merge
from mkcompile.plan.simulate.run import scaling, simulate
from mkcompile.plan.simulate.sweep import parse_site, sweep
from mkcompile.plan.topology import PRESETS, preset

_BAD_ARGUMENTS = 2


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
    result = sweep([parse_site(site, world) for site in options.site], machine, Policy(fuse=options.fuse))
    console.print(result.table())
    return result.to_dict()


def _models(options: argparse.Namespace, console: Console) -> dict[str, object]:
    load = Workload(batch=options.batch, tokens=options.tokens, train=not options.forward)
    names = options.model or ["llama3-70b"]
    policy = Policy(fuse=options.fuse)
    results: list[SimulationResult] = []
    for name in names:
        if options.nodes:
            results.append(scaling(name, options.topology, options.nodes, load, policy))
        else:
            results.append(simulate(name, options.topology, _layout(options), load, policy))
    merged = merge(results)
    console.print(merged.table())
    if not options.nodes:
        console.print(merged.operator_table())
    if options.plot is not None:
        merged.plot(options.plot)
        console.print(f"written: {options.plot}", markup=False)
    return merged.to_dict(timeline=options.timeline)


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
    add("--site", action="append", metavar="OPERATOR:MxNxK", help="predict single operators in place of models")
    add("--world", type=int, help="ranks of the single operators (default: all GPUs)")
    add("--json", type=Path, metavar="FILE")
    add("--timeline", action="store_true", help="put the first model's events into the JSON")
    add("--plot", type=Path, metavar="FILE", help="bars of compute and exposed communication (png, svg, pdf)")
    return parser
