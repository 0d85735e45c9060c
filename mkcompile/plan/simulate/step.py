"""One step of a model as tasks: every layer forward, then backward, with parameter traffic beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mkcompile.ops.problem import Problem
from mkcompile.plan.constants import constants
from mkcompile.plan.decide import Policy
from mkcompile.plan.gemm_cost import Gemm, cublas_us, elementwise_us
from mkcompile.plan.simulate.engine import Task
from mkcompile.plan.simulate.layout import Layout, Workload
from mkcompile.plan.simulate.models import Model
from mkcompile.plan.simulate.pieces import SIDE, Attention, ExpertLayer, Pieces
from mkcompile.plan.topology import Topology

_BYTES = 2
_BACKWARD_ATTENTION = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is simulated."""

    model: Model
    topology: Topology
    layout: Layout
    workload: Workload

    @property
    def rows(self) -> int:
        """Tokens of one tensor-parallel group."""
        return self.workload.batch * self.workload.tokens // self.layout.context


def step_tasks(case: Case, policy: Policy, fuse: bool) -> list[Task]:
    """All tasks of one step on one GPU; GPUs are alike."""
    builder = _Builder(case, Pieces(topology=case.topology, policy=policy, fuse=fuse))
    builder.step()
    return builder.pieces.tasks


class _Builder:
    def __init__(self, case: Case, pieces: Pieces) -> None:
        self.case, self.pieces = case, pieces
        layout, topology = case.layout, case.topology
        self.context_span = layout.span(layout.context, layout.tensor, topology)
        self.data_span = layout.span(layout.data, layout.tensor * layout.context, topology)
        self.expert_span = layout.span(layout.expert, 1, topology)

    def step(self) -> None:
        """Forward, head, backward; gradients must have arrived at the end."""
        layers = self.case.model.num_layers
        weights = [self._gather_parameters(layer) for layer in range(layers)]
        for layer in range(layers):
            self._wait(weights[layer], f"layer {layer} parameters")
            self._attention(layer, backward=False)
            self._mlp(layer, backward=False)
        self._head()
        if not self.case.workload.train:
            return
        reductions = []
        for layer in reversed(range(layers)):
            weight = self._gather_parameters(layer) if layer < layers - 1 else None
            self._wait(weight, f"layer {layer} parameters again")
            self._mlp(layer, backward=True)
            self._attention(layer, backward=True)
            reductions.append(self._reduce_gradients(layer))
        self._wait(reductions[-1], "gradients")

    def _wait(self, index: int | None, name: str) -> None:
        if index is not None:
            self.pieces.compute(f"wait for {name}", 0.0, after=(index,))

    def _parameter_bytes(self, layer: int) -> float:
        """Bytes of a layer's weights on this rank, experts left out: those are shared over other groups."""
        model = self.case.model
        dense = model.attention_params + (0 if model.is_sparse(layer) else model.mlp_params(layer))
        return dense / self.case.layout.tensor * _BYTES

    def _gather_parameters(self, layer: int) -> int | None:
        layout = self.case.layout
        if layout.data == 1 or not layout.sharded:
            return None
        size = self._parameter_bytes(layer)
        return self.pieces.collective(f"layer {layer} parameters", "all_gather", size, self.data_span, SIDE)

    def _reduce_gradients(self, layer: int) -> int | None:
        layout = self.case.layout
        if layout.data == 1:
            return None
        kind = "reduce_scatter" if layout.sharded else "all_reduce"
        size = self._parameter_bytes(layer)
        last = len(self.pieces.tasks) - 1
        return self.pieces.collective(f"layer {layer} gradients", kind, size, self.data_span, SIDE, after=(last,))

    def _problem(self, operator: str, n: int, k: int) -> Problem:
        return Problem(
            operator=operator, m=self.case.rows, n=n, k=k, world_size=self.case.layout.tensor, dtype="bfloat16",
            dtype_bytes=_BYTES,
        )  # fmt: skip

    def _into_columns(self, name: str, n: int, k: int) -> None:
        """x @ w with w's columns divided: x is gathered first where it is sharded along the tokens."""
        if self.case.layout.sequence:
            self.pieces.site(self._problem("all_gather_gemm", n, k), name)
        else:
            self.pieces.gemm(name, self.case.rows, n, k)

    def _out_of_rows(self, name: str, n: int, k: int) -> None:
        """x @ w with w's rows divided: partial sums are reduced."""
        operator = "gemm_reduce_scatter" if self.case.layout.sequence else "gemm_all_reduce"
        self.pieces.site(self._problem(operator, n, k), name)

    def _norm(self, name: str) -> None:
        shards = self.case.layout.tensor if self.case.layout.sequence else 1
        self.pieces.elementwise(name, 3.0 * self.case.rows * self.case.model.hidden * _BYTES / shards)

    def _attention(self, layer: int, backward: bool) -> None:
        model, layout, rows = self.case.model, self.case.layout, self.case.rows
        name = f"layer {layer} {'backward ' if backward else ''}"
        qkv, out = model.qkv_features // layout.tensor, model.num_heads * model.head_dim // layout.tensor
        source = model.hidden if model.latent is None else model.latent.q_rank
        if backward:
            self._into_columns(f"{name}out dgrad", out, model.hidden)
            self.pieces.gemm(f"{name}out wgrad", out, model.hidden, rows)
            self._softmax(name + "attention", _BACKWARD_ATTENTION)
            self._out_of_rows(f"{name}qkv dgrad", source, qkv)
            self.pieces.gemm(f"{name}qkv wgrad", qkv, source, rows)
            self._norm(f"{name}norm")
            return
        self._norm(f"{name}norm")
        if model.latent is not None:
            compressed = model.latent.q_rank + model.latent.kv_rank + model.latent.rope_dim
            self.pieces.gemm(f"{name}compress", rows // layout.tensor or 1, compressed, model.hidden)
        self._into_columns(f"{name}qkv", qkv, source)
        self._softmax(name + "attention", 1.0)
        self._out_of_rows(f"{name}out", model.hidden, out)

    def _softmax(self, name: str, factor: float) -> None:
        """Causal attention, tokens balanced over the context group."""
        case, model = self.case, self.case.model
        heads = model.num_heads / case.layout.tensor
        extra = 0 if model.latent is None else model.latent.rope_dim
        pairs = case.workload.batch * case.workload.tokens**2 / 2 / case.layout.context
        flops = 2.0 * pairs * heads * (2 * model.head_dim + extra)
        kv_heads = max(1.0, model.num_kv_heads / case.layout.tensor)
        kv_bytes = case.workload.batch * case.workload.tokens * kv_heads * 2 * model.head_dim * _BYTES
        Attention(flops=flops, kv_bytes=kv_bytes, span=self.context_span).add(self.pieces, name, factor)

    def _mlp(self, layer: int, backward: bool) -> None:
        name = f"layer {layer} {'backward ' if backward else ''}"
        if not backward:
            self._norm(f"{name}mlp norm")
        if self.case.model.is_sparse(layer):
            self._experts(name, backward)
        else:
            self._dense(name, self.case.model.intermediate, backward)

    def _dense(self, name: str, intermediate: int, backward: bool) -> None:
        model, rows = self.case.model, self.case.rows
        width = intermediate // self.case.layout.tensor
        if backward:
            self._into_columns(f"{name}down dgrad", width, model.hidden)
            self.pieces.gemm(f"{name}down wgrad", width, model.hidden, rows)
            self.pieces.elementwise(f"{name}activation", 5.0 * rows * width * _BYTES)
            self._out_of_rows(f"{name}up dgrad", model.hidden, 2 * width)
            self.pieces.gemm(f"{name}up wgrad", 2 * width, model.hidden, rows)
            return
        whole = self._ffn(width)
        if not self.pieces.takes_whole(whole, self._ffn_parts(width), self._ffn_between_us(width)):
            self._ffn_apart(name, width)
        elif self.pieces.fuse:
            self.pieces.site(whole, f"{name}ffn")
        else:
            with self.pieces.within(f"{name}ffn"):
                self._ffn_apart(name, width)

    def _ffn_apart(self, name: str, width: int) -> None:
        self._into_columns(f"{name}up", 2 * width, self.case.model.hidden)
        self.pieces.elementwise(f"{name}activation", 3.0 * self.case.rows * width * _BYTES)
        self._out_of_rows(f"{name}down", self.case.model.hidden, width)

    def _ffn(self, width: int) -> Problem:
        """Both projections with the gated activation between them as one operator."""
        hidden, sequence = self.case.model.hidden, self.case.layout.sequence
        one = self._problem("ffn", hidden, hidden)
        return replace(one, hidden=width, activation="silu", gated=True, gathers=sequence, scatters=sequence)

    def _ffn_parts(self, width: int) -> list[Problem]:
        """Its sites where the parts are planned apart; without a gather the first projection is none."""
        hidden, sequence = self.case.model.hidden, self.case.layout.sequence
        down = self._problem("gemm_reduce_scatter" if sequence else "gemm_all_reduce", hidden, width)
        return [self._problem("all_gather_gemm", 2 * width, hidden), down] if sequence else [down]

    def _ffn_between_us(self, width: int) -> float:
        """The activation, and a first projection that is no site."""
        rows, hidden = self.case.rows, self.case.model.hidden
        gpu, known = self.case.topology.gpu, constants()
        activation = elementwise_us(3.0 * rows * width * _BYTES, gpu, known)
        return (
            activation
            if self.case.layout.sequence
            else activation + cublas_us(Gemm(m=rows, n=2 * width, k=hidden), gpu, known)
        )

    def _experts(self, name: str, backward: bool) -> None:
        model, layout = self.case.model, self.case.layout
        assert model.experts is not None
        tokens = max(1, self.case.rows // layout.tensor)
        layer = ExpertLayer(
            rows=tokens * model.experts.top_k,
            top_k=model.experts.top_k,
            local_experts=model.experts.count // layout.expert,
            hidden=model.hidden,
            intermediate=model.experts.intermediate,
            span=self.expert_span,
        )
        layer.add(self.pieces, name + "moe", 2 if backward else 1)
        if model.experts.shared:
            self._dense(name + "shared ", model.experts.shared * model.experts.intermediate, backward)

    def _head(self) -> None:
        model, layout = self.case.model, self.case.layout
        columns = -(-model.vocab // layout.tensor // 8) * 8
        self._into_columns("head", columns, model.hidden)
        if self.case.workload.train:
            self._out_of_rows("head dgrad", model.hidden, columns)
            self.pieces.gemm("head wgrad", columns, model.hidden, self.case.rows)
