"""Site counts on other torch versions: a virtual environment each, kept under build/.

Only versions that pip can install here as they are; each that can't be installed is named.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("2.11.0", "newest")
TESTS = ("tests/models", "tests/operators", "-m", "not slow and not gpu and not gpu2")


def main() -> int:
    """0 where every version that could be installed passes."""
    status = 0
    for version in VERSIONS:
        venv = ROOT / "build" / f"venv-torch-{version}"
        python = venv / "bin" / "python"
        torch = "torch>=2.11" if version == "newest" else f"torch=={version}"
        steps = (
            [sys.executable, "-m", "venv", venv],
            [python, "-m", "pip", "install", "-q", torch],
            [python, "-m", "pip", "install", "-q", "-e", f"{ROOT}[test]"],
        )
        if any(subprocess.run([str(part) for part in step], check=False).returncode for step in steps):
            sys.stdout.write(f"torch {version}: could not be installed here; not tested\n")
            continue
        status |= subprocess.run([str(python), "-m", "pytest", *TESTS], cwd=ROOT, check=False).returncode
    return status


if __name__ == "__main__":
    sys.exit(main())
