"""Sizes of the models that `simulate` knows. Source: the models' own configuration files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mkcompile.errors import OptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the feed-forward network, from layer `first_layer` on."""

    count: int
    top_k: int
    intermediate: int
    shared: int = 0
    first_layer: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention: ranks of the compressed query and key-value, and head sizes."""

    q_rank: int
    kv_rank: int
    rope_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder-only transformer with gated feed-forward networks."""

    name: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    vocab: int
    head_dim: int = 128
    experts: Experts | None = None
    latent: Latent | None = None

    @property
    def qkv_features(self) -> int:
        """Columns of the query, key and value projections together (after the compression, where there is one)."""
        if self.latent is not None:
            return self.num_heads * (3 * self.head_dim + self.latent.rope_dim)
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def attention_params(self) -> int:
        """Weights of one layer's attention."""
        out = self.num_heads * self.head_dim * self.hidden
        if self.latent is None:
            return self.hidden * self.qkv_features + out
        one = self.latent
        down = self.hidden * (one.q_rank + one.kv_rank + one.rope_dim)
        query = one.q_rank * self.num_heads * (self.head_dim + one.rope_dim)
        return down + query + one.kv_rank * self.num_heads * 2 * self.head_dim + out

    def mlp_params(self, layer: int) -> int:
        """Weights of one layer's feed-forward network, all experts counted."""
        if self.is_sparse(layer):
            assert self.experts is not None
            each = 3 * self.hidden * self.experts.intermediate
            return each * (self.experts.count + self.experts.shared) + self.hidden * self.experts.count
        return 3 * self.hidden * self.intermediate

    def is_sparse(self, layer: int) -> bool:
        """Does this layer have experts?"""
        return self.experts is not None and layer >= self.experts.first_layer

    @property
    def num_params(self) -> int:
        """All weights but those of the norms."""
        layers = sum(self.attention_params + self.mlp_params(layer) for layer in range(self.num_layers))
        return layers + 2 * self.vocab * self.hidden


_MODELS = (
    Model(
        name="llama3-8b", num_layers=32, hidden=4096, intermediate=14336, num_heads=32, num_kv_heads=8, vocab=128256
    ),
    Model(
        name="llama3-70b", num_layers=80, hidden=8192, intermediate=28672, num_heads=64, num_kv_heads=8, vocab=128256
    ),
    Model(
        name="llama3-405b", num_layers=126, hidden=16384, intermediate=53248, num_heads=128, num_kv_heads=8,
        vocab=128256,
    ),
    Model(
        name="mixtral-8x7b", num_layers=32, hidden=4096, intermediate=14336, num_heads=32, num_kv_heads=8, vocab=32000,
        experts=Experts(count=8, top_k=2, intermediate=14336),
    ),
    Model(
        name="deepseek-v3", num_layers=61, hidden=7168, intermediate=18432, num_heads=128, num_kv_heads=128,
        vocab=129280, experts=Experts(count=256, top_k=8, intermediate=2048, shared=1, first_layer=3),
        latent=Latent(q_rank=1536, kv_rank=512, rope_dim=64),
    ),
)  # fmt: skip
MODELS: Mapping[str, Model] = {one.name: one for one in _MODELS}


def model(name: str) -> Model:
    """Raises: OptionError for an unknown name, with the known ones."""
    if name not in MODELS:
        raise OptionError(f"unknown model {name!r}; valid: {', '.join(MODELS)}")
    return MODELS[name]
