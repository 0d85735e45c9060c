"""`python -m mkcompile bench ops | models`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Hand the rest of the arguments on."""
    parser = argparse.ArgumentParser(prog="python -m mkcompile bench", description=__doc__)
    what = "operators alone, which needs GPUs, or whole models, which --device cpu rehearses"
    parser.add_argument("what", choices=("ops", "models"), help=what)
    given, rest = parser.parse_args(argv[:1]), list(argv[1:])
    if given.what == "models":
        from benchmarks.models.command import main as models

        return models(rest)
    from benchmarks.run import main as operators

    operators(rest)
    return 0
