"""Random programs out of the known forms: products, sums, biases, casts, gathers and scatters in every layout,
feed-forward networks.

A program is a list of small frozen values, so that hypothesis can shrink it, and runs on tensors of whole numbers that
stay small enough for every sum to be exact: what is rewritten must be equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

GROUP = "0"
aten = torch.ops.aten
c10d = torch.ops._c10d_functional

WEIGHTS = ("permuted", "raw", "sliced", "permuted_twice", "bmm", "low_rank")
BIASES = ("none", "addmm", "added_2d", "added_3d", "unsqueezed")
BETWEEN = ("none", "half", "double_view", "relu", "float", "clone")
REDUCTIONS = ("all_reduce", "split", "split_with_sizes", "slice", "moved", "flat")
GATHERS = ("none", "split", "slice", "views", "moved", "unbound", "selected")
# What the block's result is added to: its operand, what came before it, in either order, a part of it, both times it.
RESIDUALS = ("none", "operand", "stream", "stream", "reversed", "viewed", "kept")
# In float32 only: the sums of the others would be rounded.
NETWORKS = ("none", "relu", "relu2", "gated", "packed")


@dataclass(frozen=True, slots=True)
class Term:
    """One product: which layout its weight has, its bias, a scale of its own, whether something else reads it."""

    weight: str
    bias: str
    scaled: bool
    kept: bool


@dataclass(frozen=True, slots=True)
class Block:
    """[B, S, H] -> [B, S, H]: (gather,) sum of products or a network, something between, reduction, (gather back)."""

    terms: tuple[Term, ...]
    gather: str
    between: str
    reduction: str
    op: str
    dim: int
    twice: bool
    residual: str
    network: str


@dataclass(frozen=True, slots=True)
class Program:
    """Blocks, one after the other, on x [batch, 2 * world_size, 2 * world_size]."""

    world_size: int
    batch: int
    dtype: torch.dtype
    blocks: tuple[Block, ...]


def _once_in(number: int) -> st.SearchStrategy[bool]:
    return st.integers(1, number).map(lambda drawn: drawn == number)


def terms() -> st.SearchStrategy[Term]:
    return st.builds(
        Term,
        weight=st.sampled_from(WEIGHTS),
        bias=st.sampled_from(("none",) * 8 + BIASES),
        scaled=_once_in(6),
        kept=_once_in(16),
    )


def blocks() -> st.SearchStrategy[Block]:
    return st.builds(
        Block,
        terms=st.lists(terms(), min_size=1, max_size=3).map(tuple),
        gather=st.sampled_from(GATHERS),
        between=st.sampled_from(("none",) * 8 + BETWEEN),
        reduction=st.sampled_from(REDUCTIONS),
        op=st.sampled_from(("sum",) * 5 + ("avg", "avg", "max")),
        dim=st.integers(0, 2),
        twice=_once_in(3),
        residual=st.sampled_from(RESIDUALS),
        network=st.sampled_from(("none",) * 2 + NETWORKS),
    )


def programs(max_blocks: int = 3) -> st.SearchStrategy[Program]:
    return st.builds(
        Program,
        world_size=st.sampled_from((2, 4)),
        batch=st.sampled_from((1, 2, 4)),
        dtype=st.sampled_from((torch.float32, torch.float32, torch.bfloat16)),
        blocks=st.lists(blocks(), min_size=1, max_size=max_blocks).map(tuple),
    )


def residual_programs() -> st.SearchStrategy[Program]:
    """Of products and reductions alone, nearly all of them added to something."""
    term = st.builds(
        Term, weight=st.sampled_from(WEIGHTS), bias=st.just("none"), scaled=st.just(False), kept=_once_in(8)
    )
    block = st.builds(
        Block,
        terms=st.lists(term, min_size=1, max_size=2).map(tuple),
        gather=st.just("none"),
        between=st.just("none"),
        reduction=st.sampled_from(("all_reduce", "all_reduce", "split")),
        op=st.sampled_from(("sum", "avg")),
        dim=st.integers(0, 1),
        twice=_once_in(4),
        residual=st.sampled_from(RESIDUALS),
        network=st.just("none"),
    )
    return st.builds(
        Program,
        world_size=st.sampled_from((2, 4)),
        batch=st.sampled_from((1, 2)),
        dtype=st.just(torch.float32),
        blocks=st.lists(block, min_size=2, max_size=4).map(tuple),
    )


def weights_of(program: Program) -> list[Tensor]:
    """x, then for each block weight and bias of each term, up and down weights of the network."""
    width = 2 * program.world_size
    tensors = [torch.zeros(program.batch, width, width, dtype=program.dtype)]
    for block in program.blocks:
        for term in block.terms:
            columns = width + 3 if term.weight == "sliced" else width
            tensors.append(torch.zeros(width, columns, dtype=program.dtype))
            tensors.append(torch.zeros(width, dtype=program.dtype))
        tensors.append(torch.zeros(width, 2 * width, dtype=program.dtype))
        tensors.append(torch.zeros(width, width, dtype=program.dtype))
    return tensors


def function_of(program: Program) -> Callable[..., list[Tensor]]:
    """The program as a function of `weights_of(program)`: the last value, then those that are kept on the way."""

    def function(x: Tensor, *rest: Tensor) -> list[Tensor]:
        kept: list[Tensor] = []
        parameters = list(rest)
        for block in program.blocks:
            x = _block(block, program.world_size, x, parameters, kept)
        return [x, *kept]

    return function


def _block(block: Block, world_size: int, x: Tensor, parameters: list[Tensor], kept: list[Tensor]) -> Tensor:
    stream = x
    x = x.clamp(-1, 1)
    if block.gather != "none":
        x = _gather(block.gather, _own_part(x, world_size), world_size)
    own = [(parameters.pop(0), parameters.pop(0)) for _ in block.terms]
    up, down = parameters.pop(0), parameters.pop(0)

    def unreduced() -> Tensor:
        is_network = block.network != "none" and x.dtype == torch.float32
        return _network(block.network, x, up, down) if is_network else _sum(block, x, own, kept)

    y = _reduce(block, world_size, _between(block.between, unreduced()))
    if block.twice:
        y = y + _reduce(block, world_size, _between(block.between, unreduced()))
    y = y.to(x.dtype)
    if block.reduction != "all_reduce":
        y = torch.ones(y.shape, dtype=y.dtype) + y if block.residual == "stream" else y
        y = torch.cat(c10d.wait_tensor(c10d.all_gather_into_tensor(y, world_size, GROUP)).chunk(world_size), 0)
        y = y.reshape(x.shape)
    return _added(block.residual, stream, x, y, kept)


def _added(residual: str, stream: Tensor, x: Tensor, y: Tensor, kept: list[Tensor]) -> Tensor:
    if residual == "viewed":
        return (stream.reshape(-1) + y.reshape(-1)).reshape(y.shape)
    if residual == "kept":
        kept.append(stream.relu())
    if residual == "reversed":
        return y + stream
    return {"none": y, "operand": y + x}.get(residual, stream + y)


def _sum(block: Block, x: Tensor, own: list[tuple[Tensor, Tensor]], kept: list[Tensor]) -> Tensor:
    products = [_term(term, x, w, bias) for term, (w, bias) in zip(block.terms, own, strict=True)]
    kept += [product + 1 for term, product in zip(block.terms, products, strict=True) if term.kept]
    total = products[0]
    for product in products[1:]:
        total = total + product
    return total


def _network(kind: str, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    width = down.shape[0]
    if kind == "packed":
        gate, value = torch.mm(flat, up).split(width, -1)
        hidden = torch.relu(gate) * value
    else:
        hidden = torch.relu(torch.mm(flat, up[:, :width]))
    if kind == "relu2":
        hidden = hidden.pow(2)
    if kind == "gated":
        hidden = hidden * torch.mm(flat, up[:, width:])
    return torch.mm(hidden, down).reshape(x.shape)


def _own_part(x: Tensor, world_size: int) -> Tensor:
    """Half a sequence that the gather makes whole again (of other values than before)."""
    return x[:, : x.shape[1] // world_size].contiguous()


def _gather(form: str, x: Tensor, world_size: int) -> Tensor:
    gathered = c10d.wait_tensor(c10d.all_gather_into_tensor(x, world_size, GROUP))
    batch = x.shape[0]
    if form == "split" or (form == "views" and batch != 1):
        return torch.cat(gathered.split(batch), 1)
    if form == "slice":
        return torch.cat([gathered[i * batch : (i + 1) * batch] for i in range(world_size)], 1)
    stacked = gathered.reshape(world_size, *x.shape)
    if form == "moved":
        return stacked.movedim(0, 1).reshape(batch, -1, x.shape[2])
    if form == "unbound":
        return torch.cat(stacked.unbind(0), 1)
    if form == "selected":
        return torch.cat([stacked[rank] for rank in range(world_size)], 1)
    return gathered.reshape(1, -1, x.shape[2])


def _term(term: Term, x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    batch, rows, width = x.shape
    weight = {
        "permuted": lambda: w.permute(1, 0),
        "raw": lambda: w,
        "sliced": lambda: w[:, 2 : 2 + width],
        "permuted_twice": lambda: w.permute(1, 0).permute(1, 0),
        "bmm": lambda: w,
        "low_rank": lambda: w[:2],
    }[term.weight]()
    flat = x.reshape(-1, width)
    if term.weight == "low_rank":
        flat = torch.mm(flat, w[:, :2]).clamp(-1, 1)
    if term.weight == "bmm":
        product = torch.bmm(flat.unsqueeze(0), weight.unsqueeze(0)).squeeze(0)
    elif term.bias == "addmm":
        product = torch.addmm(bias, flat, weight)
    else:
        product = torch.mm(flat, weight)
    if term.bias == "added_2d":
        product = product + bias
    y = product.reshape(batch, rows, width)
    if term.bias == "added_3d":
        y = y + bias
    if term.bias == "unsqueezed":
        y = bias[None, None, :] + y
    return y * 2.0 if term.scaled else y


def _between(what: str, y: Tensor) -> Tensor:
    return {
        "none": lambda: y,
        "half": lambda: y / 2,
        "double_view": lambda: y.reshape(-1, y.shape[-1]).reshape(y.shape),
        "relu": lambda: torch.relu(y),
        "float": lambda: y.float(),
        "clone": lambda: y.clone(),
    }[what]()


def _reduce(block: Block, world_size: int, y: Tensor) -> Tensor:
    if block.reduction == "all_reduce":
        return c10d.wait_tensor(c10d.all_reduce(y, block.op, GROUP))
    dim = block.dim if y.shape[block.dim] % world_size == 0 else 1
    size = y.shape[dim] // world_size
    pieces: list[Tensor] | tuple[Tensor, ...]
    if block.reduction == "split":
        pieces = y.split(size, dim)
    elif block.reduction == "split_with_sizes":
        pieces = aten.split_with_sizes(y, [size] * world_size, dim)
    else:
        pieces = [y.narrow(dim, i * size, size) for i in range(world_size)]
    laid_out = y.reshape(-1, y.shape[-1]) if block.reduction == "flat" else torch.cat(list(pieces))
    if block.reduction == "moved":
        ranks = y.reshape(*y.shape[:dim], world_size, size, *y.shape[dim + 1 :])
        laid_out = ranks.movedim(dim, 0).reshape(laid_out.shape)
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(laid_out, block.op, world_size, GROUP))
