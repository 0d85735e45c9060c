"""The backend, the passes and the site counts of all models on other torch versions, each in its own environment.

The environments stay under build/. A version that can't be installed here is named and not tested, and is no failure;
the last lines say what became of each version.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The oldest that is supported, and whatever pip takes for the newest.
VERSIONS = {"2.11.0": "torch==2.11.0", "newest": "torch"}
FOLDERS = ("tests/models", "tests/operators", "tests/passes", "tests/ops", "tests/backend")
TESTS = (*FOLDERS, "-q", "-m", "(not slow or other_torch) and not gpu and not gpu2")


def say(text: str) -> None:
    """One line, at once."""
    sys.stdout.write(f"other torch: {text}\n")
    sys.stdout.flush()


def succeeds(*command: str | Path) -> bool:
    """Run a command in the repository, its output shown."""
    return subprocess.run([str(part) for part in command], cwd=ROOT, check=False).returncode == 0


def environment(name: str, requirement: str) -> Path | None:
    """The Python of an environment with this torch and the package; None where it can't be made."""
    venv = ROOT / "build" / f"venv-torch-{name}"
    python = venv / "bin" / "python"
    if not python.exists():
        say(f"making {venv.relative_to(ROOT)}")
        if not succeeds(sys.executable, "-m", "venv", venv):
            return None
    pip = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check")
    # torch and the package at once: nothing that the package asks for may exchange the torch
    return python if succeeds(*pip, requirement, "-e", f"{ROOT}[test]") else None


def version_of(python: Path) -> str:
    """The torch that it imports."""
    command = [str(python), "-c", "import torch; print(torch.__version__)"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main() -> int:
    """0 where every version that could be installed passes."""
    results: dict[str, str] = {}
    for name, requirement in VERSIONS.items():
        python = environment(name, requirement)
        if python is None:
            results[name] = "could not be installed here; not tested"
            continue
        label = f"{name} ({version_of(python)})"
        say(f"testing torch {label}")
        results[label] = "passed" if succeeds(python, "-m", "pytest", *TESTS) else "FAILED"
    for name, result in results.items():
        say(f"torch {name}: {result}")
    return int("FAILED" in results.values())


if __name__ == "__main__":
    sys.exit(main())
