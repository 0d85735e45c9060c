"""The command line: `python -m mkcompile <command>`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

import mkcompile
from mkcompile.errors import MkcompileError
from mkcompile.inspect.commands import delegated, doctor, explain, trace, tune

# Exit statuses: 0 done, 1 what was asked for failed, 2 wrong use or something missing.
FAILED, MISUSED = 1, 2


def parser() -> argparse.ArgumentParser:
    """All commands; each sets `run`."""
    top = argparse.ArgumentParser(
        prog="python -m mkcompile", description="Fuses GEMMs with the communication around them, under torch.compile."
    )
    top.add_argument("--version", action="version", version=f"mkcompile {mkcompile.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    explain.add(commands)
    doctor.add(commands)
    trace.add(commands)
    tune.add(commands)
    delegated.add(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments, rest = parser().parse_known_args(argv)
    errors = Console(stderr=True)
    if rest and not arguments.passes_rest:
        errors.print(f"unknown arguments: {escape(' '.join(rest))}", style="red")
        return MISUSED
    arguments.rest = rest
    try:
        status: int = arguments.run(arguments)
    except MkcompileError as error:
        errors.print(f"[red]{escape(type(error).__name__)}:[/red] {escape(str(error))}")
        return MISUSED
    except BrokenPipeError:
        sys.stderr.close()
        return FAILED
    return status
