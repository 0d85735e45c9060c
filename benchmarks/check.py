"""Is a contender's result right? Compared on sampled rows in fp64, against what bf16 rounding allows."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .contenders import Contender, Operands
from .style import ALONE

_SAMPLED_ROWS = 256
_TOLERANCE = 6e-3  # three roundings to bf16, each 1.7e-3 in norm on random data


def _gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return parts


def expected_rows(operands: Operands, rows: torch.Tensor, summed: bool) -> torch.Tensor:
    """The given rows of the product, or of its sum over the ranks, in fp32 of fp64 sums."""
    sampled = operands.x[rows].double() @ operands.w.double().t()
    if summed:
        dist.all_reduce(sampled)
    return sampled.float()


def is_right(op: str, contender: Contender, operands: Operands) -> bool:
    """Whether the result holds on every rank; it is poisoned before the call where it can be."""
    m, rank, world = operands.x.shape[0], dist.get_rank(), dist.get_world_size()
    rows = torch.linspace(0, m - 1, _SAMPLED_ROWS, device=operands.x.device).round().long()
    alone = op in ("gemm", "all_gather_gemm") or contender.name in ALONE
    truth = expected_rows(operands, rows, summed=not alone)
    contender.call().fill_(float("nan"))
    torch.cuda.synchronize()
    dist.barrier()
    out = contender.call()
    if op == "gemm_reduce_scatter" and not alone:
        first = rank * (m // world)
        mine = (rows >= first) & (rows < first + m // world)
        got, wanted = out[rows[mine] - first].float(), truth[mine]
    else:
        got, wanted = out[rows].float(), truth
    error = (got - wanted).norm() / wanted.norm()
    same = torch.ones(1, device=out.device)
    if op == "gemm_all_reduce" and contender.name.startswith("mkcompile"):
        first_rank = _gathered(out[rows])[0]
        same[0] = float(torch.equal(first_rank.view(torch.int16), out[rows].view(torch.int16)))
    right = torch.logical_and(error < _TOLERANCE, same.bool()).float()
    dist.all_reduce(right, dist.ReduceOp.MIN)
    return bool(right.item())
