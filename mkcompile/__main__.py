"""`python -m mkcompile`."""

from __future__ import annotations

import sys

from mkcompile.inspect.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
