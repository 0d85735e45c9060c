"""How a model is laid over GPUs, and how much it is given to do."""

from __future__ import annotations

from dataclasses import dataclass

from mkcompile.errors import OptionError
from mkcompile.plan.simulate.models import Model
from mkcompile.plan.topology import Span, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Ranks of each kind of parallelism. Consecutive ranks form a tensor group, then context, then data groups.

    `sequence`: activations between the blocks are sharded along the tokens (all-gather and reduce-scatter in place of
    all-reduce). `expert`: ranks that share the experts, consecutive ones. `sharded`: data parallelism shards parameters
    (FSDP) in place of replicating them.
    """

    tensor: int = 1
    context: int = 1
    data: int = 1
    expert: int = 1
    sequence: bool = True
    sharded: bool = True

    @property
    def num_gpus(self) -> int:
        """All ranks."""
        return self.tensor * self.context * self.data

    def check(self, model: Model, topology: Topology) -> None:
        """Raises: OptionError where the layout fits neither model nor machine."""
        if min(self.tensor, self.context, self.data, self.expert) < 1:
            raise OptionError(f"every degree must be at least 1: {self}")
        if self.num_gpus > topology.num_gpus:
            raise OptionError(f"the layout needs {self.num_gpus} GPUs, {topology.name} has {topology.num_gpus}")
        if model.num_heads % self.tensor:
            raise OptionError(f"{model.name} has {model.num_heads} heads, not divisible by tensor={self.tensor}")
        if self.num_gpus % self.expert:
            raise OptionError(f"expert={self.expert} does not divide {self.num_gpus} GPUs")
        if model.experts is None and self.expert > 1:
            raise OptionError(f"{model.name} has no experts")
        if model.experts is not None and model.experts.count % self.expert:
            raise OptionError(f"expert={self.expert} does not divide {model.experts.count} experts")

    def span(self, size: int, stride: int, topology: Topology) -> Span:
        """Where a group of `size` ranks that lie `stride` apart is."""
        per_node = max(1, min(size, topology.gpus_per_node // stride))
        return Span(num_nodes=-(-size // per_node), per_node=per_node)

    def __str__(self) -> str:
        parts = {"TP": self.tensor, "CP": self.context, "DP": self.data, "EP": self.expert}
        text = " ".join(f"{name}{size}" for name, size in parts.items() if size > 1)
        return (text or "1 GPU") + (" SP" if self.sequence and self.tensor > 1 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One step: `batch` sequences of `tokens` tokens for each data-parallel rank; with a backward pass if `train`."""

    batch: int = 1
    tokens: int = 4096
    train: bool = True

    def __post_init__(self) -> None:
        if min(self.batch, self.tokens) < 1:
            raise OptionError(f"a workload needs at least one sequence of one token: {self}")

    def __str__(self) -> str:
        return f"{self.batch} x {self.tokens} {'train' if self.train else 'forward'}"
