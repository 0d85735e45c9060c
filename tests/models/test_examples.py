"""The README's example is a file that runs, under torchrun, on ranks of this machine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "tensor_parallel.py"
# fp32: only the order of sums differs between eager and compiled.
TOLERANCE = 1e-5


def test_the_readme_shows_the_file() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert EXAMPLE.read_text() in blocks


def test_it_runs_on_two_ranks_and_agrees_with_eager() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    # the ranks' lines may run into each other
    differences = [float(one) for one in re.findall(r"from eager (\d\.\d\de[+-]\d\d)", done.stdout)]
    assert len(differences) == 2
    assert max(differences) <= TOLERANCE
