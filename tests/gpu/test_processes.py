"""Two processes on two GPUs: every family of `run_processes`."""

from __future__ import annotations

import json
import time

import pytest

from tests.gpu.run_processes import FAMILIES, batches, run_batch

pytestmark = pytest.mark.gpu2

# What a larger reserve changes is a measurement, not a requirement.
MEASURED_ONLY = ("nccl_reserve_16", "nccl_reserve_32")


LIMIT_S = 1800.0


@pytest.mark.parametrize("names", batches([name for name in FAMILIES if name not in MEASURED_ONLY]), ids="+".join)
def test_families(names: list[str]) -> None:
    results = list(run_batch(names, "cuda", 2.0, time.monotonic() + LIMIT_S))
    failed = [result for result in results if not result["ok"]]
    assert not failed, "\n".join(json.dumps(result, default=str, indent=1) for result in failed)
