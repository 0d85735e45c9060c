"""Scaled 8-bit products through the whole backend, generated code included, on two ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

from tests.backend.calls import ALWAYS, Compared, compare
from tests.spawn import run_case

E4M3 = torch.float8_e4m3fn


def block(x: Tensor, up: Tensor, down: Tensor, scale: Tensor) -> Tensor:
    """Sequence parallel: gathered as bytes, two products, scattered; then a reduced one."""
    gathered = funcol.all_gather_tensor(x.to(E4M3).view(torch.uint8), 0, "0").view(E4M3)
    hidden = torch.relu(torch._scaled_mm(gathered, up.t(), scale, scale, out_dtype=torch.bfloat16))
    y = torch._scaled_mm(hidden.to(E4M3), down.t(), scale, scale, out_dtype=torch.bfloat16)
    part = funcol.reduce_scatter_tensor(y, "sum", 0, "0")
    z = torch._scaled_mm(part.to(E4M3), up.t(), scale, scale, out_dtype=torch.bfloat16)
    return funcol.all_reduce(z, "sum", "0")


def compiled_block(rank: int, world_size: int) -> Compared:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(16, 32, generator=generator)
    up, down = (torch.randn(size, generator=generator).to(E4M3) for size in ((48, 32), (32, 48)))
    given = x, up, down, torch.tensor(0.25)
    call = torch.compile(block, backend="mkernel", fullgraph=True, options=ALWAYS)
    with torch.no_grad():
        return compare(nn.Module(), lambda: [block(*given)], lambda: [call(*given)])


def test_it_equals_eager_and_is_fused() -> None:
    for compared in run_case(compiled_block, 2):
        assert compared.worst == pytest.approx(0.0, abs=0.5)  # values are of the order of 100, of 8 bits
        assert len(compared.groups) == 3
