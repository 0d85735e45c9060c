"""`doctor`: what this machine can do, what is missing, and how to get it."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

HELP = "what this machine can do, what is missing, and how to get it"
DESCRIPTION = (
    "Checks software, GPUs and what joins them, symmetric memory (tried), NICs and caches; says what is missing, what "
    "that costs and how to get it. Exit status 0: the backend can run here, be it with reference operators."
)


def add(commands: Any) -> None:
    """Register the command."""
    one = commands.add_parser("doctor", help=HELP, description=DESCRIPTION)
    one.add_argument("--json", action="store_true", help="print JSON instead of tables")
    one.set_defaults(run=run, passes_rest=False)


def run(arguments: argparse.Namespace) -> int:
    """Check and show; 0 if the backend can run here at all."""
    from mkcompile.inspect.console import terminal
    from mkcompile.inspect.doctor import examine
    from mkcompile.inspect.doctor.show import diagnosis_to_dict, print_diagnosis

    diagnosis = examine()
    if arguments.json:
        sys.stdout.write(json.dumps(diagnosis_to_dict(diagnosis), indent=1) + "\n")
    else:
        print_diagnosis(diagnosis, terminal())
    return 0 if diagnosis.can_run else 1
