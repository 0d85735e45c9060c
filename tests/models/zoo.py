"""Every model of the matrix, by name."""

from __future__ import annotations

from collections.abc import Mapping

from tests.models import by_hand, huggingface, llama_block, megatron
from tests.models.setting import Builder

ZOO: Mapping[str, Builder] = {
    "hf_llama": huggingface.llama,
    "hf_qwen3": huggingface.qwen3,
    "hf_gemma": huggingface.gemma,
    "hf_mixtral": huggingface.mixtral,
    "dtensor_tp": llama_block.tensor_parallel,
    "dtensor_tp_bias": llama_block.tensor_parallel_bias,
    "dtensor_sp": llama_block.sequence_parallel,
    "dtensor_sp_bias": llama_block.sequence_parallel_bias,
    "dtensor_sp_each": llama_block.sequence_parallel_each,
    "megatron_tp": megatron.tensor_parallel,
    "megatron_sp": megatron.sequence_parallel,
    "by_hand": by_hand.by_hand,
}
