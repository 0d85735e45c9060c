"""How many collectives of each model meet which fate, by graph. The same for 2 and 4 ranks and any batch.

A collective counts under the operator that it became part of, so a feed-forward network that starts from a gather and
ends in a scatter counts twice; else under its kind and the reason why it stayed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

Fates = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The forward graph, alike in inference and training unless `inference` says otherwise, and the backward graph."""

    forward: Fates
    backward: Fates
    inference: Fates = field(default_factory=dict)

    def graphs(self, trains: bool) -> tuple[Fates, ...]:
        """What a run that trains, or doesn't, compiles."""
        return (self.forward, self.backward) if trains else (self.inference or self.forward,)


# Two layers: attention's and the FFN's all-reduce in each. The embedding's all-reduce follows a table look-up, and the
# head gathers its output, which no GEMM reads. Backward: one all-reduce a layer for q, k, v together, one for gate and
# up, and the head's.
_HF_DENSE = Expected(
    forward={"gemm_all_reduce": 2, "ffn": 2, "all_reduce: NO_GEMM": 1, "all_gather_into_tensor: GEMM_BEFORE_GATHER": 1},
    backward={"gemm_all_reduce": 5},
)
# The experts are grouped products, whose rows are put back in order before the all-reduce. Backward: the routing
# weights' gradients are reduced as well, and no GEMM makes them.
_HF_EXPERTS = Expected(
    forward={
        "gemm_all_reduce": 2,
        "all_reduce: GEMM_KIND": 2,
        "all_reduce: NO_GEMM": 1,
        "all_gather_into_tensor: GEMM_BEFORE_GATHER": 1,
    },
    backward={"gemm_all_reduce": 3, "all_reduce: GEMM_KIND": 2, "all_reduce: NO_GEMM": 2},
)
# In fp32 Hugging Face takes another way through the experts, an operator of its own on the CPU: no GEMM is to be seen.
_HF_EXPERTS_FLOAT32 = Expected(
    forward={"gemm_all_reduce": 2, "all_reduce: NO_GEMM": 3, "all_gather_into_tensor: GEMM_BEFORE_GATHER": 1},
    backward={"gemm_all_reduce": 3, "all_reduce: NO_GEMM": 4},
)
_TENSOR_PARALLEL = Expected(forward={"gemm_all_reduce": 1, "ffn": 1}, backward={"gemm_all_reduce": 2})
# Backward: the gradient's gather feeds the input's and the weight's gradient; their sums over q, k, v and over gate and
# up are scattered.
_SEQUENCE_PARALLEL = Expected(
    forward={"all_gather_gemm": 1, "gemm_reduce_scatter": 1, "ffn": 2},
    backward={"all_gather_gemm": 2, "gemm_reduce_scatter": 2},
)

EXPECTED: Mapping[str, Expected] = {
    "hf_llama": _HF_DENSE,
    "hf_qwen3": _HF_DENSE,
    "hf_gemma": _HF_DENSE,
    "hf_mixtral": _HF_EXPERTS,
    "dtensor_tp": _TENSOR_PARALLEL,
    "dtensor_tp_bias": _TENSOR_PARALLEL,
    "dtensor_sp": _SEQUENCE_PARALLEL,
    "dtensor_sp_bias": _SEQUENCE_PARALLEL,
    "dtensor_sp_each": _SEQUENCE_PARALLEL,
    "megatron_tp": _TENSOR_PARALLEL,
    "megatron_sp": _SEQUENCE_PARALLEL,
    "by_hand": Expected(
        inference={"all_gather_gemm": 1, "ffn": 3},
        forward={"ffn": 2},
        backward={"all_gather_gemm": 1, "gemm_reduce_scatter": 1},
    ),
}


def expected(model: str, dtype: torch.dtype) -> Expected:
    """What is expected of a model in this dtype."""
    return _HF_EXPERTS_FLOAT32 if model == "hf_mixtral" and dtype is torch.float32 else EXPECTED[model]
