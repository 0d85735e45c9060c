"""A GPT layer with collectives inside autograd functions, as Megatron-LM writes them: tensor and sequence parallel."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from tests.models.setting import SEQUENCE, Instance, Setting
from tests.regions import CopyToRegion, GatherFromSequence, ReduceFromRegion, ScatterToSequence

HIDDEN, FEATURES, HEAD = 64, 128, 8


class Layer(nn.Module):
    """LayerNorm, fused QKV, attention, projection; LayerNorm, GELU MLP. Activations are [S, B, H]."""

    def __init__(self, setting: Setting, *, sequence: bool) -> None:
        super().__init__()
        self.enter = GatherFromSequence if sequence else CopyToRegion
        self.leave = ScatterToSequence if sequence else ReduceFromRegion
        self.norm1 = nn.LayerNorm(HIDDEN, dtype=setting.dtype)
        self.norm2 = nn.LayerNorm(HIDDEN, dtype=setting.dtype)
        self.qkv = self._shard(setting, 3 * HIDDEN, HIDDEN, dim=0, seed=10)
        self.qkv_bias = nn.Parameter(setting.draw(3 * HIDDEN // setting.world_size, seed=20 + setting.rank, scale=0.1))
        self.projection = self._shard(setting, HIDDEN, HIDDEN, dim=1, seed=11)
        self.projection_bias = nn.Parameter(setting.draw(HIDDEN, seed=30, scale=0.1))
        self.up = self._shard(setting, FEATURES, HIDDEN, dim=0, seed=12)
        self.up_bias = nn.Parameter(setting.draw(FEATURES // setting.world_size, seed=40 + setting.rank, scale=0.1))
        self.down = self._shard(setting, HIDDEN, FEATURES, dim=1, seed=13)
        self.down_bias = nn.Parameter(setting.draw(HIDDEN, seed=50, scale=0.1))

    @staticmethod
    def _shard(setting: Setting, outputs: int, inputs: int, *, dim: int, seed: int) -> nn.Parameter:
        whole = setting.parameter(outputs, inputs, seed=seed).data
        return nn.Parameter(whole.chunk(setting.world_size, dim)[setting.rank].contiguous())

    def _attend(self, x_SBH: Tensor) -> Tensor:
        qkv = functional.linear(x_SBH, self.qkv, self.qkv_bias).unflatten(-1, (-1, 3, HEAD))
        q, k, v = (one.permute(1, 2, 0, 3) for one in qkv.unbind(-2))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)

    def forward(self, x_SBH: Tensor) -> Tensor:
        attended = self._attend(self.enter.apply(self.norm1(x_SBH), 0, ""))
        x_SBH = x_SBH + self.leave.apply(functional.linear(attended, self.projection), 0, "") + self.projection_bias
        inner = functional.gelu(functional.linear(self.enter.apply(self.norm2(x_SBH), 0, ""), self.up, self.up_bias))
        out: Tensor = x_SBH + self.leave.apply(functional.linear(inner, self.down), 0, "") + self.down_bias
        return out


def tensor_parallel(setting: Setting) -> Instance:
    """f and g of Megatron's first paper."""
    x_SBH = setting.draw(SEQUENCE, setting.batch, HIDDEN, seed=1).requires_grad_(setting.trains)
    return Instance.of(Layer(setting, sequence=False), x_SBH)


def sequence_parallel(setting: Setting) -> Instance:
    """Gathers and reduce-scatters along the sequence, the first dimension."""
    x_SBH = setting.draw(SEQUENCE, setting.batch, HIDDEN, seed=1).chunk(setting.world_size)[setting.rank]
    x_SBH = x_SBH.contiguous().requires_grad_(setting.trains)
    return Instance.of(Layer(setting, sequence=True), x_SBH)
