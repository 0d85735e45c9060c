"""The receipt of the GPU tests: which GPU code was tested, where, when and with what result.

`check` fails when the code and `tests/gpu_receipt.json` disagree, unless the receipt carries a `stale_reason`, which is
printed. `run` runs the GPU tests here and writes a new receipt.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECEIPT = ROOT / "tests" / "gpu_receipt.json"
GPU_CODE = ("csrc/abi/**/*", "csrc/device/**/*", "mkcompile/runtime/**/*.py")
GPU_TESTS = ("tests/gpu", "tests/runtime", "tests/operators")


def code_hash() -> str:
    """A hash of all code that runs on, compiles for or launches on a GPU."""
    digest = hashlib.sha256()
    files = {path for pattern in GPU_CODE for path in ROOT.glob(pattern) if path.is_file()}
    for path in sorted(files):
        if "__pycache__" not in path.parts:
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def check() -> int:
    """0 where the receipt fits the code or says why it does not."""
    receipt = json.loads(RECEIPT.read_text()) if RECEIPT.exists() else {}
    if receipt.get("code_sha256") == code_hash():
        sys.stdout.write(
            f"GPU tests: {receipt['passed']} passed, {receipt['failed']} failed, {receipt['skipped']} skipped on "
            f"{receipt['device']}, {receipt['date']}; the GPU code has not changed since\n"
        )
        if receipt.get("not_run_on_this_code"):
            sys.stdout.write(f"GPU tests not run on this code: {receipt['not_run_on_this_code']}\n")
        return 1 if receipt["failed"] else 0
    if receipt.get("stale_reason"):
        sys.stdout.write(
            f"GPU tests: the receipt of {receipt.get('date', 'never')} is stale: {receipt['stale_reason']}\n"
        )
        return 0
    sys.stdout.write(
        "GPU tests: the GPU code changed since they last ran; run `make test-gpu` on a machine with GPUs\n"
    )
    return 1


def run() -> int:
    """Run the GPU tests and write the receipt."""
    import torch

    if not torch.cuda.is_available():
        sys.stdout.write("make test-gpu needs an NVIDIA GPU (sm_90a; two with peer access for all of it): none found\n")
        return 2
    report = ROOT / "build" / "gpu_tests.xml"
    report.parent.mkdir(exist_ok=True)
    command = ["pytest", "-m", "gpu or gpu2", *GPU_TESTS, f"--junitxml={report}"]
    status = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=False).returncode
    write(report, f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}", torch.__version__)
    return status


def write(report: Path, device: str, torch_version: str) -> None:
    """Write the receipt from pytest's XML report."""
    from xml.etree import ElementTree

    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    receipt = {
        "code_sha256": code_hash(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": device,
        "torch": torch_version,
        "passed": total - skipped - failed,
        "failed": failed,
        "skipped": skipped,
        "stale_reason": "",
        "not_run_on_this_code": "",
        "runs": json.loads(RECEIPT.read_text()).get("runs", []) if RECEIPT.exists() else [],
    }
    RECEIPT.write_text(json.dumps(receipt, indent=2) + "\n")


if __name__ == "__main__":
    actions = {"check": check, "run": run}
    if len(sys.argv) != 2 or sys.argv[1] not in actions:
        sys.exit("usage: python tools/receipt.py check|run")
    sys.exit(actions[sys.argv[1]]())
