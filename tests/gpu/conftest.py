"""What the tests of this folder need, asked of the machine; each skip says what was missing."""

from __future__ import annotations

import os

import pytest
import torch

# Many ranks on one GPU have many streams. In one queue of the device a copy would wait behind another rank's next
# kernel, which waits for one that waits for the copy. Read when CUDA is initialised.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def _missing(num_devices: int) -> str | None:
    if torch.cuda.device_count() < num_devices:
        return f"torch.cuda.device_count() is {torch.cuda.device_count()}, {num_devices} needed"
    for device in range(num_devices):
        if torch.cuda.get_device_capability(device) != (9, 0):
            return f"compute capability {torch.cuda.get_device_capability(device)}, (9, 0) needed"
    if num_devices == 2 and not torch.cuda.can_device_access_peer(0, 1):
        return "torch.cuda.can_device_access_peer(0, 1) is False"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test here `gpu`, and skip what this machine can't run."""
    for item in items:
        if "tests/gpu/" not in item.nodeid:
            continue
        item.add_marker(pytest.mark.gpu)
        missing = _missing(2 if item.get_closest_marker("gpu2") else 1)
        if missing:
            item.add_marker(pytest.mark.skip(reason=missing))
