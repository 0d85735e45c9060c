"""Hugging Face models of random weights, sharded by the tensor-parallel plans that they bring."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.setting import SEQUENCE, Instance, Setting

VOCABULARY = 64
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "use_cache": False,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _sharded(config: Any, setting: Setting) -> Any:
    """The model as Hugging Face's loader shards it. Every rank draws the whole weights and keeps its shards."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(2026)
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = {name: tensor.to(setting.rounding).to(setting.dtype) for name, tensor in whole.state_dict().items()}
    sharding = DistributedConfig(tp_size=setting.world_size, tp_plan="auto")
    return type(whole).from_pretrained(
        None, config=config, state_dict=weights, dtype=setting.dtype, distributed_config=sharding
    )


def _instance(config: Any, setting: Setting) -> Instance:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(VOCABULARY, (setting.batch, SEQUENCE), generator=generator)
    return Instance(module=_sharded(config, setting), outputs=lambda call: call(input_ids=ids).logits)


def llama(setting: Setting) -> Instance:
    """Llama: SwiGLU FFN, grouped queries."""
    from transformers import LlamaConfig

    return _instance(LlamaConfig(**SMALL), setting)


def qwen3(setting: Setting) -> Instance:
    """Qwen3: as Llama, with a norm of each query and key head."""
    from transformers import Qwen3Config

    return _instance(Qwen3Config(**SMALL), setting)


def gemma(setting: Setting) -> Instance:
    """Gemma: the gate's activation is tanh-GELU; embedding and head share a weight."""
    from transformers import GemmaConfig

    return _instance(GemmaConfig(**SMALL), setting)


def mixtral(setting: Setting) -> Instance:
    """Mixtral with every expert chosen: a near tie between experts would make rounding errors arbitrarily large."""
    from transformers import MixtralConfig

    experts = "eager" if setting.dtype is torch.float64 else "grouped_mm"
    config = MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=4, experts_implementation=experts)
    return _instance(config, setting)
