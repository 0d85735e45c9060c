"""Models to plan for: Llama of any size on the meta device, with the tensor-parallel plan of its own library.

Each function returns `(model, args, kwargs)`, as `python -m mkcompile explain module:function` wants it, and needs a
default process group, real or fake (`--world 8`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSize:
    """The published sizes of one Llama 3 model.

    Source: the models' config.json (Llama 3.1 8B, 70B and 405B).
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    layers: int


LLAMA = {
    "8b": LlamaSize(hidden=4096, intermediate=14336, heads=32, kv_heads=8, layers=32),
    "70b": LlamaSize(hidden=8192, intermediate=28672, heads=64, kv_heads=8, layers=80),
    "405b": LlamaSize(hidden=16384, intermediate=53248, heads=128, kv_heads=8, layers=126),
}


def tensor_mesh(tensor_parallel: int | None = None) -> DeviceMesh:
    """The mesh axis of a tensor-parallel group of this size (default: the world), the innermost ranks."""
    world_size = dist.get_world_size()
    size = tensor_parallel or world_size
    return init_device_mesh("cpu", (world_size // size, size), mesh_dim_names=("dp", "tp"))["tp"]


def shard_by_own_plan(model: Any, mesh: DeviceMesh) -> nn.Module:
    """A Hugging Face model, sharded by the plan that it brings: 5.17 reads it itself, later versions get it."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan = (model._expand_parallel_plan(model.tp_plan),) if hasattr(model, "_expand_parallel_plan") else ()
    sharded: nn.Module = apply_tensor_parallelism(model, mesh, *plan)
    return sharded


def llama(
    size: str = "70b", *, tokens: int = 8192, batch: int = 1, layers: int = 1, tensor_parallel: int | None = None
) -> Example:
    """Hugging Face's Llama with its own tensor-parallel plan, `layers` of its layers, for training."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = LLAMA[size]
    config = LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        num_hidden_layers=layers,
        vocab_size=128256,
        max_position_embeddings=max(tokens, 8192),
        use_cache=False,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    shard_by_own_plan(model, tensor_mesh(tensor_parallel))
    ids = torch.zeros((batch, tokens), dtype=torch.int64, device="meta")
    return model, (), {"input_ids": ids}


class Attention(nn.Module):
    """Grouped-query attention whose projections may be sharded by heads."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.head_size = size.hidden // size.heads
        self.wq = nn.Linear(size.hidden, size.heads * self.head_size, bias=False)
        self.wk = nn.Linear(size.hidden, size.kv_heads * self.head_size, bias=False)
        self.wv = nn.Linear(size.hidden, size.kv_heads * self.head_size, bias=False)
        self.wo = nn.Linear(size.heads * self.head_size, size.hidden, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        batch, tokens, _ = x_BSD.shape
        q, k, v = (
            w(x_BSD).view(batch, tokens, -1, self.head_size).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y_BSD: Tensor = self.wo(out.transpose(1, 2).reshape(batch, tokens, -1))
        return y_BSD


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.w1 = nn.Linear(size.hidden, size.intermediate, bias=False)
        self.w3 = nn.Linear(size.hidden, size.intermediate, bias=False)
        self.w2 = nn.Linear(size.intermediate, size.hidden, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        y_BSD: Tensor = self.w2(nn.functional.silu(self.w1(x_BSD)) * self.w3(x_BSD))
        return y_BSD


class Block(nn.Module):
    """One layer of Llama in plain torch."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.hidden)
        self.attention = Attention(size)
        self.ffn_norm = nn.RMSNorm(size.hidden)
        self.ffn = FeedForward(size)

    def forward(self, x_BSD: Tensor) -> Tensor:
        h_BSD: Tensor = x_BSD + self.attention(self.attention_norm(x_BSD))
        y_BSD: Tensor = h_BSD + self.ffn(self.ffn_norm(h_BSD))
        return y_BSD


def sequence_plan() -> dict[str, Any]:
    """How a `Block` is sharded: projections by columns and rows, activations between them by tokens."""
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    scattered = RowwiseParallel(output_layouts=Shard(1))
    return {
        "attention_norm": SequenceParallel(),
        "attention": gathered,
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": scattered,
        "ffn_norm": SequenceParallel(),
        "ffn": gathered,
        "ffn.w1": ColwiseParallel(),
        "ffn.w3": ColwiseParallel(),
        "ffn.w2": scattered,
    }


def sequence_parallel_block(
    size: str = "70b", *, tokens: int = 8192, batch: int = 1, tensor_parallel: int | None = None
) -> Example:
    """One Llama layer with DTensor sequence parallelism, for training; activations are sharded by tokens."""
    mesh = tensor_mesh(tensor_parallel)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            block = Block(LLAMA[size])
    finally:
        torch.set_default_dtype(default)
    parallelize_module(block, mesh, sequence_plan())
    shape = (batch, tokens // mesh.size(), LLAMA[size].hidden)
    x_BSD = torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
    return block, (x_BSD,), {}
