"""The three operators, chunk by chunk.

Legend: M rows, N columns, K inner size. Owners are the ranks of the group; a chunk is as much of an owner's part as a
message holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from mkcompile.ops import collectives
from mkcompile.ops.all_gather_gemm import FORM_INPUT, AllGatherGemm
from mkcompile.ops.gemm_all_reduce import GemmAllReduce
from mkcompile.ops.gemm_reduce_scatter import GemmReduceScatter, scattered
from mkcompile.runtime.network_reference.movement import Place, Reduction, Spread

Summed = GemmReduceScatter | GemmAllReduce


class TooLargeError(ValueError):
    """A row does not fit into a message: on all ranks alike, before anything is sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one owner gets of a product: rows by number, and columns."""

    rows: Tensor
    columns: slice


class Product:
    """The product of a call, cut into parts for the owners and these into rounds of `step` rows."""

    def __init__(self, call: Summed, parts: Sequence[Part], slot_bytes: int) -> None:
        self._call, self._parts = call, parts
        columns = call.w[0].shape[1]
        self._columns = [len(range(*part.columns.indices(columns))) for part in parts]
        self.step = slot_bytes // max(1, self._columns[0] * call.x[0].element_size())
        if not self.step:
            raise TooLargeError(f"a row of {self._columns[0]} columns is larger than {slot_bytes} bytes")
        self.num_rounds = max(1, *(-(-part.rows.numel() // self.step) for part in parts))

    def piece(self, owner: int, number: int) -> Tensor:
        """This rank's partial of the owner's rows of a round."""
        part, call = self._parts[owner], self._call
        rows = self.rows(owner, number)
        x = [_take(x_MK, rows) for x_MK in call.x]
        w = [w_KN[:, part.columns] for w_KN in call.w]
        return collectives.sum_of_gemms(x, w, None if call.bias is None else call.bias[part.columns])

    def like(self, owner: int, number: int) -> Tensor:
        """Room for it."""
        return self._call.x[0].new_empty(self.rows(owner, number).numel(), self._columns[owner])

    def rows(self, owner: int, number: int) -> Tensor:
        """The numbers of those rows; maybe none."""
        return self._parts[owner].rows[number * self.step : (number + 1) * self.step]

    def rounded(self, total: Tensor) -> Tensor:
        """A sum over all ranks as the call wants it."""
        mean = total / self._call.world_size if self._call.reduce_op == "avg" else total
        return mean.to(self._call.x[0].dtype)


def _take(x_MK: Tensor, rows: Tensor) -> Tensor:
    if not rows.numel():
        return x_MK[:0]
    first, last = int(rows[0]), int(rows[-1])
    return x_MK[first : last + 1] if last - first + 1 == rows.numel() else x_MK[rows]


def gemm_reduce_scatter(call: GemmReduceScatter, place: Place) -> Tensor:
    """Raises: TooLargeError; TransportError and PeerTimeoutError as `Channels`."""
    product = Product(call, _scattered_parts(call), place.channels.layout.slot_bytes)
    reduction = Reduction(place, product.piece, product.like, product.num_rounds)
    chunks = []
    for iteration in range(product.num_rounds + 1):
        total = reduction.iterate(iteration)
        if total is not None:
            chunks.append(product.rounded(total))
    return torch.cat(chunks).reshape(scattered(call.shape, call.dim, call.world_size))


def _scattered_parts(call: GemmReduceScatter) -> list[Part]:
    *leading, columns = call.shape
    rows = torch.arange(prod(leading))
    if call.dim == len(leading):
        width = columns // call.world_size
        return [Part(rows=rows, columns=slice(o * width, (o + 1) * width)) for o in range(call.world_size)]
    shares = rows.reshape(leading).chunk(call.world_size, call.dim)
    return [Part(rows=share.reshape(-1), columns=slice(None)) for share in shares]


def gemm_all_reduce(call: GemmAllReduce, place: Place) -> Tensor:
    """Each rank owns equally many rows, or nearly. Raises: as above."""
    num_rows, columns = call.x[0].shape[0], call.w[0].shape[1]
    share = max(1, -(-num_rows // call.world_size))
    rows = torch.arange(num_rows)
    parts = [Part(rows=rows[o * share : (o + 1) * share], columns=slice(None)) for o in range(call.world_size)]
    product = Product(call, parts, place.channels.layout.slot_bytes)
    out_MN = call.x[0].new_empty(num_rows, columns)

    def arrived(owner: int, number: int) -> Tensor:
        first = min(num_rows, owner * share + number * product.step)
        return out_MN[first : first + product.rows(owner, number).numel()]

    reduction = Reduction(place, product.piece, product.like, product.num_rounds)
    spread = Spread(place=place, arrived=arrived, num_rounds=product.num_rounds)
    for iteration in range(product.num_rounds + place.placement.num_nodes):
        total = reduction.iterate(iteration)
        if total is not None:
            arrived(place.rank, iteration - 1).copy_(product.rounded(total))
        spread.iterate(iteration - 1)
    return out_MN


def all_gather_gemm(call: AllGatherGemm, place: Place) -> list[Tensor]:
    """Own shard first, in place; then each shard as soon as all of it is there. Raises: as above."""
    numel, step = call.x.numel(), place.channels.layout.slot_bytes // call.x.element_size()
    shards = call.x.new_empty(call.world_size, numel)
    shards[place.rank].copy_(call.x.reshape(-1))

    def arrived(owner: int, number: int) -> Tensor:
        return shards[owner, number * step : (number + 1) * step]

    spread = Spread(place=place, arrived=arrived, num_rounds=max(1, -(-numel // step)))
    products = _ByShard(call, shards) if _rows_alone(call) else None
    multiply = (lambda owner: None) if products is None else products.multiply
    num_nodes = place.placement.num_nodes
    for iteration in range(spread.num_rounds + num_nodes - 1):
        spread.iterate(iteration)
        if iteration == 0:
            multiply(place.rank)
        hop = iteration - spread.num_rounds + 1
        if hop >= 0:  # all of the shards of the node so far back in the ring
            for owner in place.placement.members((place.node - hop) % num_nodes):
                if owner != place.rank:
                    multiply(owner)
    gathered = shards.view(-1, *call.x.shape[1:])
    if call.dim:
        gathered = torch.cat(list(shards.view(call.world_size, *call.x.shape)), call.dim)
    if products is None:
        return call.of_gathered(gathered)
    return [*products.out, gathered] if call.return_gathered else products.out


def _rows_alone(call: AllGatherGemm) -> bool:
    """Is every product one of rows, so that a shard's can be computed by itself?"""
    return call.dim == 0 and call.x.dim() > 1 and all(form == FORM_INPUT for form in call.forms)


class _ByShard:
    def __init__(self, call: AllGatherGemm, shards: Tensor) -> None:
        self._call = call
        self._shards = shards.view(call.world_size, -1, call.x.shape[-1])
        num_rows = call.world_size * self._shards.shape[1]
        self.out = [call.x.new_empty(num_rows, w_KN.shape[1]) for w_KN in call.w]

    def multiply(self, owner: int) -> None:
        """The rows of an owner."""
        x_SK = self._shards[owner]
        rows = slice(owner * x_SK.shape[0], (owner + 1) * x_SK.shape[0])
        for out_MN, w_KN, bias in zip(self.out, self._call.w, self._call.bias, strict=True):
            into = partial(torch.mm, x_SK, w_KN) if bias is None else partial(torch.addmm, bias, x_SK, w_KN)
            into(out=out_MN[rows])
