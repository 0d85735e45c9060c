"""On which GPUs ranks of one process lie: on the first alone, and on two where there are two."""

from __future__ import annotations

import pytest

_TWO = pytest.mark.gpu2

ONE_AND_TWO_GPUS = pytest.mark.parametrize("devices", [(0, 0), pytest.param((0, 1), marks=_TWO)], ids=str)
#: Devices by node.
NODES_ON_ONE_AND_TWO_GPUS = pytest.mark.parametrize(
    ("devices", "nodes"),
    [
        ((0, 0), 2), ((0, 0, 0, 0), 2), pytest.param((0, 1), 2, marks=_TWO),
        pytest.param((0, 0, 1, 1), 2, marks=_TWO), pytest.param((0, 1, 0, 1), 2, marks=_TWO),
    ],
    ids=str,
)  # fmt: skip
