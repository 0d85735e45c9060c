"""Commands that other rooms carry out: this file only knows where they are and what they need."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from rich.console import Console

MISSING = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Delegated:
    """A command that is `main(arguments)` of a module; `needs` says what to get where it is missing."""

    name: str
    module: str
    help: str
    needs: str


COMMANDS = (
    Delegated(
        name="demo",
        module="mkcompile.demo",
        help="compile two real models on two ranks and compare them with eager",
        needs="a version of mkcompile with the demo in it",
    ),
    Delegated(
        name="bench",
        module="benchmarks.command",
        help="time operators and models against cuBLAS + NCCL and others",
        needs="the repository's benchmarks folder: run it from a checkout, with two CUDA GPUs",
    ),
    Delegated(
        name="simulate",
        module="mkcompile.plan.simulate",
        help="predict whole steps of models on machines of 1 to 1024 GPUs",
        needs="a version of mkcompile with the simulator in it",
    ),
    Delegated(
        name="warmup",
        module="mkcompile.runtime.warmup",
        help="compile kernels ahead of their first use",
        needs="a version of mkcompile with the kernel warm-up in it, and NVRTC (pip install mkcompile[cuda])",
    ),
)


def add(commands: Any) -> None:
    """Register all of them; their own arguments are passed on as they are."""
    for one in COMMANDS:
        parser = commands.add_parser(one.name, help=one.help, add_help=False)
        parser.set_defaults(run=run, passes_rest=True, delegated=one)


def run(arguments: argparse.Namespace) -> int:
    """Call the module's `main` with the arguments that are not ours."""
    one: Delegated = arguments.delegated
    command = main_of(one.module)
    if command is None:
        Console(stderr=True).print(f"[red]{one.name}[/red] is not here ({one.module}); it needs {one.needs}")
        return MISSING
    return command(arguments.rest) or 0


def main_of(module: str) -> Callable[[list[str]], int | None] | None:
    """The module's command, or None where there is no such module or it has none."""
    try:
        if find_spec(module) is None:
            return None
    except ModuleNotFoundError:
        return None
    command: Callable[[list[str]], int | None] | None = getattr(import_module(module), "main", None)
    return command
