"""The proxy's loop neither allocates nor locks, logs, reads the environment or opens files: counted while it works."""

from __future__ import annotations

import subprocess

from tests.host.conftest import ROOT, build

TRANSPORTS = ("emulated", "emulated, shuffled", "emulated, a copy engine", "tcp", "tcp, pinned memory")
DEFECTS = ("allocations", "locks", "logs", "reads of the environment", "files")


def test_the_loop_allocates_locks_logs_and_reads_nothing() -> None:
    """Each way 10,000 messages and as many credits; then a callback of the loop does each of these, and is found."""
    build("--target", "mkproxy_quiet")
    program = str(ROOT / "build" / "host" / "mkproxy_quiet")
    done = subprocess.run([program, "10000"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"ok {name}: 10000 messages each way; nothing" in done.stdout for name in TRANSPORTS), done.stdout
    assert all(f"ok defect: {name}: " in done.stdout for name in DEFECTS), done.stdout
