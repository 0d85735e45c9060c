"""The demo's models: a Hugging Face Llama under its own tensor-parallel plan, and one Llama layer, sequence parallel.

Weights are random, drawn from a fixed seed, the same on every rank before they are sharded; nothing is downloaded.
Shapes: B samples, S tokens of one sample, H hidden features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from mkcompile.inspect.examples import Block, LlamaSize, sequence_plan, shard_by_own_plan

SEED = 2026


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large the demo's models are: `sequence` counts the tokens of one sample before they are sharded."""

    num_layers: int = 2
    hidden: int = 256
    intermediate: int = 512
    num_heads: int = 8
    num_kv_heads: int = 4
    vocabulary: int = 512
    batch: int = 2
    sequence: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A module, how the demo calls it, and the inputs that a gradient is wanted of where it trains."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    trains: bool
    inputs: Mapping[str, Tensor]

    def output(self, call: Callable[..., Any]) -> Tensor:
        """What the module, or its compiled form, gives."""
        result = call(*self.args, **self.kwargs)
        output: Tensor = result if isinstance(result, Tensor) else result.logits
        return output


def llama_config(size: Size) -> Any:
    """A Hugging Face configuration of this size."""
    from transformers import LlamaConfig

    return LlamaConfig(
        num_hidden_layers=size.num_layers,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        vocab_size=size.vocabulary,
        max_position_embeddings=4 * size.sequence,
        use_cache=False,
    )


def sharded_causal_lm(config: Any, mesh: DeviceMesh, dtype: torch.dtype) -> nn.Module:
    """The configuration's causal language model, sharded over the mesh by the tensor-parallel plan that it brings."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(mesh.device_type)  # type: ignore[no-untyped-call]
    return shard_by_own_plan(model, mesh)


def tensor_parallel_inference(size: Size, mesh: DeviceMesh, dtype: torch.dtype) -> Workload:
    """A whole Llama on replicated tokens."""
    module = sharded_causal_lm(llama_config(size), mesh, dtype).eval()
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(size.vocabulary, (size.batch, size.sequence), generator=generator).to(mesh.device_type)
    return Workload(
        name=f"Llama of {size.num_layers} layers, tensor parallel, inference",
        module=module,
        args=(),
        kwargs={"input_ids": ids},
        trains=False,
        inputs={},
    )


def _sequence_plan() -> dict[str, ParallelStyle]:
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    gathered_by_name = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
    )
    return {
        "input_layernorm": SequenceParallel(),
        "self_attn": gathered_by_name,
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        **dict.fromkeys(columns, ColwiseParallel()),
        **dict.fromkeys(rows, RowwiseParallel(output_layouts=Shard(1))),
    }


def sequence_parallel_training(size: Size, mesh: DeviceMesh, dtype: torch.dtype) -> Workload:
    """One Llama layer; between its linears the activations are sharded along the sequence."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    torch.manual_seed(SEED)
    config = llama_config(size)
    config._attn_implementation = "sdpa"
    layer = LlamaDecoderLayer(config, layer_idx=0).to(mesh.device_type, dtype)
    parallelize_module(layer, mesh, _sequence_plan())
    positions = torch.arange(size.sequence, device=mesh.device_type)[None]
    x_BSH = torch.randn(size.batch, size.sequence, size.hidden).to(mesh.device_type, dtype)
    rotation = LlamaRotaryEmbedding(config)(x_BSH, positions)
    shard = x_BSH.chunk(mesh.size(), 1)[mesh.get_local_rank()].contiguous().requires_grad_()
    return Workload(
        name="Llama layer, sequence parallel, training",
        module=layer,
        args=(shard,),
        kwargs={"position_embeddings": rotation},
        trains=True,
        inputs={"hidden_states": shard},
    )


def plain_training(size: Size, mesh: DeviceMesh, dtype: torch.dtype) -> Workload:
    """The same layer in plain torch, for machines without Hugging Face's library."""
    torch.manual_seed(SEED)
    sizes = LlamaSize(
        hidden=size.hidden, intermediate=size.intermediate, heads=size.num_heads, kv_heads=size.num_kv_heads, layers=1
    )
    block = Block(sizes).to(mesh.device_type, dtype)
    parallelize_module(block, mesh, sequence_plan())
    x_BSH = torch.randn(size.batch, size.sequence, size.hidden).to(mesh.device_type, dtype)
    shard = x_BSH.chunk(mesh.size(), 1)[mesh.get_local_rank()].contiguous().requires_grad_()
    return Workload(
        name="Llama layer in plain torch, sequence parallel, training",
        module=block,
        args=(shard,),
        kwargs={},
        trains=True,
        inputs={"x_BSD": shard},
    )
