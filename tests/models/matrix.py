"""Which cells there are."""

from __future__ import annotations

import torch

from tests.models.harness import Cell
from tests.models.zoo import ZOO

DTYPES = (torch.bfloat16, torch.float32)
BATCHES = (1, 3)


def by_name(cells: list[Cell]) -> dict[str, Cell]:
    """The cells under their names."""
    return {cell.name: cell for cell in cells}


WIDE = by_name(
    [
        Cell(model=model, trains=trains, dtype=dtype, batch=batch)
        for model in ZOO
        for trains in (False, True)
        for dtype in DTYPES
        for batch in BATCHES
    ]
)

# Every model once each way: site counts on other versions of torch.
SITES = by_name(
    [Cell(model=model, trains=trains, dtype=torch.bfloat16, batch=3) for model in ZOO for trains in (False, True)]
)

# A taste of the wide matrix for every run of the tests.
QUICK = by_name(
    [
        Cell(model="hf_llama", trains=False, dtype=torch.bfloat16, batch=3),
        Cell(model="dtensor_sp", trains=True, dtype=torch.bfloat16, batch=1),
        Cell(model="megatron_tp", trains=True, dtype=torch.float32, batch=3),
    ]
)

# With Inductor's code generation.
GENERATED = by_name(
    [
        Cell(model="hf_llama", trains=True, dtype=torch.bfloat16, batch=3, how="inductor"),
        Cell(model="hf_mixtral", trains=False, dtype=torch.float32, batch=1, how="inductor"),
        Cell(model="dtensor_sp", trains=True, dtype=torch.bfloat16, batch=3, how="inductor"),
        Cell(model="dtensor_tp_bias", trains=True, dtype=torch.float32, batch=1, how="inductor"),
        Cell(model="megatron_sp", trains=True, dtype=torch.float32, batch=3, how="inductor"),
        Cell(model="by_hand", trains=False, dtype=torch.bfloat16, batch=1, how="inductor"),
    ]
)
