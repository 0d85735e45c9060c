"""`tune`: measures candidates on this machine and keeps the best; what to tune is named, or collected from a model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

from mkcompile.errors import OptionError
from mkcompile.inspect.commands import explain
from mkcompile.ops.problem import Problem
from mkcompile.plan import tune_command
from mkcompile.plan.simulate.sweep import parse_site

HELP = "measure candidates on this machine and keep the best"
# Of a symbolic number of rows: few, where a flag costs as much as the product, and many.
SYMBOLIC_ROWS = (16, 128, 1024, 8192)


def add(commands: Any) -> None:
    """Register the command."""
    parser = tune_command.parser()
    one = commands.add_parser("tune", help=HELP, description=tune_command.__doc__, parents=[parser])
    one.add_argument("target", metavar="MODULE:FUNCTION", nargs="?", help="tune the sites of a model, as for explain")
    one.add_argument("--op", nargs="+", metavar="OPERATOR", help="with --shape: what to tune")
    one.add_argument("--shape", nargs="+", metavar="MxNxK", help="every --op in every --shape")
    one.add_argument("--rows", type=int, nargs="+", default=SYMBOLIC_ROWS, help="m of sites whose m is symbolic")
    one.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an argument for FUNCTION")
    one.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    one.set_defaults(run=run, passes_rest=False)


def run(arguments: argparse.Namespace) -> int:
    """Tune; 0 if everything was measured.

    Raises: OptionError.
    """
    problems = [*tune_command.problems_of(arguments), *_named(arguments)]
    if arguments.target:
        problems += collect(arguments.target, explain.pairs(arguments.set), arguments.ranks, arguments.rows)
        if not problems:
            raise OptionError(f"{arguments.target} has no collective that an operator could take")
    return tune_command.run(arguments, problems, where(arguments.device, arguments.ranks))


def _named(arguments: argparse.Namespace) -> list[Problem]:
    if bool(arguments.op) != bool(arguments.shape):
        raise OptionError("--op and --shape belong together")
    pairs = [(op, shape) for op in arguments.op or () for shape in arguments.shape]
    return [parse_site(f"{op}:{shape}", arguments.ranks) for op, shape in pairs]


def where(device: str, num_ranks: int) -> tune_command.Where:
    """GPUs where there are enough of them; else the references on CPU tensors.

    Raises: OptionError where GPUs are asked for and not there.
    """
    from mkcompile.runtime.measure import gpu_bench

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and count < num_ranks:
        raise OptionError(f"--device cuda with {num_ranks} ranks needs as many GPUs; there are {count}")
    if device == "cpu" or count < num_ranks:
        Console(stderr=True).print(
            ("--device cpu" if device == "cpu" else f"{count} GPUs for {num_ranks} ranks")
            + ": a rehearsal that times the references on the CPU over gloo. It says nothing of GPUs; no plan for them "
            "reads it"
        )
        return tune_command.CPU
    return tune_command.Where(backend="cpu:gloo,cuda:nccl", make_bench=gpu_bench)


def collect(target: str, given: dict[str, Any], num_ranks: int, rows: Sequence[int]) -> list[Problem]:
    """The problems of a model's sites that have a known m, or each of `rows`; each once.

    Raises: OptionError, GroupError.
    """
    from mkcompile.inspect.explain import Request, explain_request
    from mkcompile.inspect.offline import fake_world

    with fake_world(num_ranks):
        model, args, kwargs = explain.call(explain.load(target), given)
        report = explain_request(
            Request(model=model, args=args, kwargs=kwargs, options={"mkernel.fuse": "always"}, backward=True)
        )
    found = [one.problem for one in report.collectives if one.fused and one.problem is not None]
    known = [one if one.m else replace(one, m=m) for one in found for m in ((one.m,) if one.m else rows)]
    return list(dict.fromkeys(known))
