"""A Llama block in plain torch and its DTensor plans: tensor parallel, sequence parallel, and variants of them."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from tests.models.setting import SEQUENCE, Instance, Setting

HIDDEN, FEATURES, HEADS, HEAD = 64, 128, 8, 8


def _linear(setting: Setting, inputs: int, outputs: int, *, bias: bool, seed: int) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=bias, dtype=setting.dtype)
    linear.weight = setting.parameter(outputs, inputs, seed=seed)
    if bias:
        linear.bias = nn.Parameter(setting.draw(outputs, seed=seed + 100, scale=0.1))
    return linear


class Attention(nn.Module):
    """Causal self-attention; the number of local heads follows from the width of the local projections."""

    def __init__(self, setting: Setting, *, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (_linear(setting, HIDDEN, HIDDEN, bias=bias, seed=10 + i) for i in range(4))

    def forward(self, x_BSH: Tensor) -> Tensor:
        heads = [one(x_BSH).unflatten(-1, (-1, HEAD)).transpose(1, 2) for one in (self.q, self.k, self.v)]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


class SwiGLU(nn.Module):
    """silu(x w1) * (x w3), then w2."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.w1 = _linear(setting, HIDDEN, FEATURES, bias=False, seed=20)
        self.w3 = _linear(setting, HIDDEN, FEATURES, bias=False, seed=21)
        self.w2 = _linear(setting, FEATURES, HIDDEN, bias=False, seed=22)

    def forward(self, x_BSH: Tensor) -> Tensor:
        out: Tensor = self.w2(functional.silu(self.w1(x_BSH)) * self.w3(x_BSH))
        return out


class GeluMLP(nn.Module):
    """gelu(x w1 + b1) w2 + b2."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.w1 = _linear(setting, HIDDEN, FEATURES, bias=True, seed=20)
        self.w2 = _linear(setting, FEATURES, HIDDEN, bias=True, seed=22)

    def forward(self, x_BSH: Tensor) -> Tensor:
        out: Tensor = self.w2(functional.gelu(self.w1(x_BSH)))
        return out


class Block(nn.Module):
    """Attention and FFN, each behind an RMSNorm and beside a residual."""

    def __init__(self, setting: Setting, *, gelu: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(HIDDEN, eps=1e-5, dtype=setting.dtype)
        self.attention = Attention(setting, bias=gelu)
        self.norm2 = nn.RMSNorm(HIDDEN, eps=1e-5, dtype=setting.dtype)
        self.ffn: nn.Module = GeluMLP(setting) if gelu else SwiGLU(setting)

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_BSH = x_BSH + self.attention(self.norm1(x_BSH))
        out: Tensor = x_BSH + self.ffn(self.norm2(x_BSH))
        return out


def _projections(block: Block, inputs: ParallelStyle, outputs: ParallelStyle) -> dict[str, ParallelStyle]:
    up = [f"ffn.{name}" for name, _ in block.ffn.named_children() if name != "w2"]
    columns = [*(f"attention.{name}" for name in "qkv"), *up]
    return {**dict.fromkeys(columns, inputs), **dict.fromkeys(("attention.o", "ffn.w2"), outputs)}


def _parallel(setting: Setting, block: Block, plan: dict[str, ParallelStyle]) -> nn.Module:
    mesh = init_device_mesh("cpu", (setting.world_size,))
    return parallelize_module(block, mesh, plan)


def _replicated_instance(setting: Setting, module: nn.Module) -> Instance:
    x_BSH = setting.draw(setting.batch, SEQUENCE, HIDDEN, seed=1).requires_grad_(setting.trains)
    return Instance.of(module, x_BSH)


def _sharded_instance(setting: Setting, module: nn.Module) -> Instance:
    x_BSH = setting.draw(setting.batch, SEQUENCE, HIDDEN, seed=1).chunk(setting.world_size, 1)[setting.rank]
    x_BSH = x_BSH.contiguous().requires_grad_(setting.trains)
    return Instance.of(module, x_BSH)


def tensor_parallel(setting: Setting) -> Instance:
    """Column- and row-parallel linears, activations replicated."""
    block = Block(setting)
    return _replicated_instance(
        setting, _parallel(setting, block, _projections(block, ColwiseParallel(), RowwiseParallel()))
    )


def tensor_parallel_bias(setting: Setting) -> Instance:
    """The same with biases and a GELU MLP: DTensor divides the row-parallel bias by the world size."""
    block = Block(setting, gelu=True)
    return _replicated_instance(
        setting, _parallel(setting, block, _projections(block, ColwiseParallel(), RowwiseParallel()))
    )


def _sequence_parallel(setting: Setting, block: Block) -> Instance:
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan = {
        **_projections(block, ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1))),
        "norm1": SequenceParallel(use_local_output=True),
        "norm2": SequenceParallel(use_local_output=True),
        "attention": gather,
        "ffn": gather,
    }
    return _sharded_instance(setting, _parallel(setting, block, plan))


def sequence_parallel(setting: Setting) -> Instance:
    """Activations sharded along the sequence between the linears; one gather for all column-parallel ones."""
    return _sequence_parallel(setting, Block(setting))


def sequence_parallel_bias(setting: Setting) -> Instance:
    """The same with biases and a GELU MLP."""
    return _sequence_parallel(setting, Block(setting, gelu=True))


def sequence_parallel_each(setting: Setting) -> Instance:
    """Every column-parallel linear gathers its own input, as `ColwiseParallel(input_layouts=Shard(1))` asks."""
    block = Block(setting)
    columns = ColwiseParallel(input_layouts=Shard(1))
    plan = {
        **_projections(block, columns, RowwiseParallel(output_layouts=Shard(1))),
        "norm1": SequenceParallel(use_local_output=True),
        "norm2": SequenceParallel(use_local_output=True),
    }
    return _sharded_instance(setting, _parallel(setting, block, plan))
