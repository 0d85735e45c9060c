"""`Plan`: how one operator call is carried out. Integers and names only, so that equal plans have equal digests."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any


class Refusal(Enum):
    """Why the planner leaves a site unfused. The passes map these to their own reasons."""

    NO_GAIN = "no gain is predicted for this size"
    NO_P2P = "the GPUs of the group can't reach each other's memory"
    NO_NETWORK_KERNEL = "the group spans nodes and no kernel for that is available"
    UNEVEN_NODES = "the group has more ranks on one node than on another"
    TOO_MANY_RANKS = "the group has more ranks than kernels join"
    TINY_PAYLOAD = "the payload is so small that a flag costs more than the overlap saves"
    DTYPE = "no kernel for this dtype; use bfloat16 or float16"
    LAYOUT = "n and k must be multiples of 8 and all weights must have one layout, [n, k] or [k, n]"
    WEIGHT_PRODUCT = "all products are of the transposed gathered tensor"
    SHAPE = "no kernel takes this shape: the scattered or gathered rows must divide evenly"
    ONE_RANK = "the group has one rank"
    NO_KERNEL = "no kernel for this operator on this GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One block's share of the output, [rows, columns], and its step along k."""

    rows: int
    columns: int
    depth: int = 64

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.depth}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """How the SMs are divided; the sum is the GPU's SM count.

    `intra` moves data inside the node, `send` and `receive` to and from others; `reserve` is left to other kernels.
    """

    compute: int
    intra: int = 0
    send: int = 0
    receive: int = 0
    reserve: int = 0

    def __post_init__(self) -> None:
        if self.compute < 1 or min(self.intra, self.send, self.receive, self.reserve) < 0:
            raise ValueError(f"roles need a compute block and no negative counts; got {self}")

    @property
    def grid(self) -> int:
        """Blocks of the launch: one an SM, all but the reserve."""
        return self.compute + self.intra + self.send + self.receive

    @property
    def num_sms(self) -> int:
        """All SMs of the GPU."""
        return self.grid + self.reserve


UNFUSED = "unfused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Variant, tile, stages, roles, order and transport of one call.

    `lag`: an own tile comes so many tiles after the peer's tile of the same turn (reductions). `raster`: row blocks
    that share a column strip. `pace_ns`: time between two panels of a tile on their way to the peer, 0 for at once.
    `chunk_bytes`: unit of transfer of the communication blocks or the copy engine, 0 where tiles are stored directly.
    `split`: blocks of a cluster that share one tile's k. Transport `turns` or `handed` (few rows): the math groups of a
    block with several tiles take turns, or hand partials over to others that store them; `ends`: they take turns, and
    the cluster shares only its first and its last tile.
    Variant `unfused`: cuBLAS and NCCL; every other field but `operator` and `world_size` is then without meaning.
    """

    operator: str
    variant: str
    world_size: int
    tile: Tile
    stages: int
    roles: Roles
    transport: str
    chunk_bytes: int = 0
    pace_ns: int = 0
    lag: int = 0
    raster: int = 8
    split: int = 1

    @property
    def fused(self) -> bool:
        """Is there a kernel to launch?"""
        return self.variant != UNFUSED

    @property
    def name(self) -> str:
        """Which kernel: `operator/variant/tile`, and where a tile is shared by how many."""
        shared = f"/{self.split}" if self.split > 1 else ""
        return f"{self.operator}/{self.variant}/{self.tile}{shared}"

    @property
    def grid(self) -> int:
        """Blocks of the launch."""
        return self.roles.grid

    def to_json(self) -> str:
        """Canonical text: equal plans, equal text, in every process."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Raises: ValueError for text that `to_json` did not write."""
        values: dict[str, Any] = json.loads(text)
        if set(values) != {one.name for one in fields(cls)}:
            raise ValueError("not a plan: wrong fields")
        return cls(**{**values, "tile": Tile(**values["tile"]), "roles": Roles(**values["roles"])})

    def digest(self) -> str:
        """What ranks compare at the first launch."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]
