"""Two processes on two GPUs: every family of `run_processes`, each in a pair of processes of its own."""

from __future__ import annotations

import json

import pytest

from tests.gpu.run_processes import FAMILIES, run_family

pytestmark = pytest.mark.gpu2

# What a larger reserve changes is a measurement, not a requirement.
MEASURED_ONLY = ("nccl_reserve_16", "nccl_reserve_32")


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in MEASURED_ONLY])
def test_family(name: str) -> None:
    failed = [result for result in run_family(name, "cuda", 2.0) if not result["ok"]]
    assert not failed, "\n".join(json.dumps(result, default=str, indent=1) for result in failed)
