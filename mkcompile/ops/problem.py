"""`Problem`: the size of one operator call, as the planner and the kernels see it; and its FLOPs and bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One fused site, with nothing in it that depends on the rank.

    Shapes: the GEMM part is [m, k] x [k, n]; `m` counts all rows of the GEMM that this rank computes
    (for all-gather GEMMs the gathered rows), `k` is the sum over the GEMMs that are added up, `n` the sum over
    the weights that share one gathered input. `m` is 0 where it is symbolic at compile time.
    An FFN's `k` and `n` are its input and output features and `hidden` the features between, on this rank.
    `outer` is the product of the dimensions before the scattered or gathered one (1: one contiguous slice a rank).
    `dtype` is that of the operands; a scaled product's operands have fewer bytes than its result, which then has
    `out_bytes`. `scales` says how many there are: `tensor`, or `row` for one a row of x and a column of w.
    `weight_products` of a gather's `num_gemms` are products of the gathered tensor transposed, as weight gradients are.
    `num_nodes` and `per_node`: nodes that the group spans and the most of its ranks on one; 0: one node, or as
    consecutive ranks fill the machine's nodes.
    Units: `dtype_bytes` and `out_bytes` bytes an element (`out_bytes` 0: as the operands).
    """

    operator: str
    m: int
    n: int
    k: int
    world_size: int
    dtype: str
    dtype_bytes: int
    outer: int = 1
    num_gemms: int = 1
    dim: str = "rows"
    weight_layout: str = "nk"
    has_bias: bool = False
    reduce_op: str = "sum"
    hidden: int = 0
    activation: str = ""
    gated: bool = False
    returns_gathered: bool = False
    weight_products: int = 0
    gathers: bool = False
    scatters: bool = False
    out_bytes: int = 0
    scales: str = ""
    num_nodes: int = 0
    per_node: int = 0

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {self.world_size}")
        if min(self.m, self.n, self.k) < 0:
            raise ValueError(f"sizes must not be negative, got m={self.m} n={self.n} k={self.k}")

    @property
    def flops(self) -> int:
        """Floating-point operations of this rank (2 for a multiply-add)."""
        if self.hidden:
            ups = 2 if self.gated else 1
            return 2 * self.m * self.hidden * (ups * self.k + self.n)
        return 2 * self.m * self.n * self.k

    @property
    def result_bytes(self) -> int:
        """Bytes of one element of the result."""
        return self.out_bytes or self.dtype_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes that each rank must send to others at least (ring or direct exchange, two-shot all-reduce)."""
        out_bytes = self.m * self.n * self.result_bytes
        in_bytes = self.m * self.k * self.dtype_bytes
        if self.operator == "all_gather_gemm":
            crossing = in_bytes
        elif self.operator == "ffn":
            crossing = (in_bytes if self.gathers else 0) + out_bytes * (1 if self.scatters else 2)
        else:
            crossing = out_bytes * (2 if self.operator == "gemm_all_reduce" else 1)
        return crossing * (self.world_size - 1) // self.world_size

    def key(self) -> str:
        """A name for everything but `m`: equal on all ranks, stable between processes and versions of Python."""
        known = ("m",) if self.num_nodes else ("m", "num_nodes", "per_node")
        return ",".join(f"{name}={value}" for name, value in asdict(self).items() if name not in known)
