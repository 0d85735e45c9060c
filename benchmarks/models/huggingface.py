"""Whole Hugging Face models of random weights, under the tensor-parallel plans that they bring: prefill and decode.

Nothing is downloaded. The cache is static: each call writes at the same position and reads what is before it, so that
calls can be repeated, compiled and captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mkcompile.inspect.examples import shard_by_own_plan

_SEED = 2026


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model of the library by its configuration class and sizes; `decoded` is the length of the cache in decode."""

    config: str
    layers: int
    hidden: int
    features: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    decoded: int = 1024

    def configuration(self) -> Any:
        """For `from_config`."""
        import transformers

        return getattr(transformers, self.config)(
            num_hidden_layers=self.layers,
            hidden_size=self.hidden,
            intermediate_size=self.features,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head,
            vocab_size=self.vocabulary,
            max_position_embeddings=8192,
            tie_word_embeddings=False,
        )


#: Widths of Llama 3.2 1B and Qwen3 1.7B, half and less than half as deep.
ARCHITECTURES = {
    "HF-Llama": Architecture(
        config="LlamaConfig", layers=8, hidden=2048, features=8192, heads=32, kv_heads=8, head=64, vocabulary=128256
    ),
    "HF-Qwen3": Architecture(
        config="Qwen3Config", layers=8, hidden=2048, features=6144, heads=16, kv_heads=8, head=128, vocabulary=151936
    ),
    "HF-tiny": Architecture(
        config="LlamaConfig", layers=1, hidden=64, features=128, heads=4, kv_heads=2, head=16, vocabulary=64, decoded=16
    ),
}


class Inference(nn.Module):
    """Logits of the last tokens; the cache's length is put back at the start of each call."""

    def __init__(self, model: nn.Module, cache: Any, start: int) -> None:
        super().__init__()
        self.model, self.cache, self.start = model, cache, start

    def hold_as(self, dtype: torch.dtype) -> None:
        """Keys and values, which are no buffers that `to` would find."""
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys.to(dtype), layer.values.to(dtype)

    def forward(self, ids_BT: Tensor) -> Tensor:
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.start)
        positions = torch.arange(self.start, self.start + ids_BT.shape[1], device=ids_BT.device)[None]
        out = self.model(
            input_ids=ids_BT, position_ids=positions, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )
        logits: Tensor = out.logits
        return logits


def _filled_cache(config: Any, batch: int, length: int, mesh: DeviceMesh, dtype: torch.dtype) -> Any:
    """Of this rank's heads; random keys and values stand for the tokens before."""
    from transformers import StaticCache

    cache: Any = StaticCache(config=config, max_cache_len=length)
    heads = config.num_key_value_heads // mesh.size()
    generator = torch.Generator(mesh.device_type).manual_seed(_SEED + mesh.get_local_rank())
    some = torch.zeros(batch, heads, 1, config.head_dim, dtype=dtype, device=mesh.device_type)
    for layer in cache.layers:
        layer.lazy_initialization(some, some)
        for held in (layer.keys, layer.values):
            held.normal_(generator=generator)
    return cache


def inference(name: str, batch: int, tokens: int, mesh: DeviceMesh, dtype: torch.dtype) -> tuple[Inference, Tensor]:
    """The model and its input: one new token of each sequence is a step of decode, more are a prefill."""
    from transformers import AutoModelForCausalLM

    architecture = ARCHITECTURES[name]
    config = architecture.configuration()
    torch.manual_seed(_SEED)
    with torch.device(mesh.device_type):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()  # type: ignore[no-untyped-call]
    sharded = shard_by_own_plan(model, mesh)
    for module in sharded.modules():  # sums of gradients, which nobody takes here and Dynamo can't trace
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()
    start = architecture.decoded - 1 if tokens == 1 else 0
    cache = _filled_cache(config, batch, max(start + tokens, 1), mesh, dtype)
    generator = torch.Generator().manual_seed(_SEED)
    ids = torch.randint(architecture.vocabulary, (batch, tokens), generator=generator)
    return Inference(sharded, cache, start), ids.to(mesh.device_type)
