"""Runs one cell of the matrix on one rank: its truth in fp64, eager, compiled; counts sites and measures errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch._inductor.compile_fx import compile_fx, fake_tensor_prop
from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
from torch._inductor.virtualized import V
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from mkcompile.config import Options
from mkcompile.ops.registry import Call, set_launcher
from mkcompile.passes.fusion_pass import FusionPass
from mkcompile.passes.site import Site
from mkcompile.runtime.wiring import install
from tests.models.setting import Builder, Instance, Setting
from tests.models.zoo import ZOO

How = Literal["graphs", "inductor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell. `how`: run the rewritten graphs as they are (`graphs`), or Inductor's generated code (`inductor`)."""

    model: str
    trains: bool
    dtype: torch.dtype
    batch: int
    how: How = "graphs"

    @property
    def name(self) -> str:
        mode = "training" if self.trains else "inference"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.model}-{mode}-{dtype}-batch{self.batch}-{self.how}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """Distance of one tensor from the truth, of the eager and of the compiled model; `scale` is the truth's own size.

    `worst` is over elements, `rms` over the tensor.
    """

    name: str
    finite: bool
    eager_worst: float
    eager_rms: float
    compiled_worst: float
    compiled_rms: float
    scale_worst: float
    scale_rms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one rank saw. `sites`: for each graph (forward, backward), how many collectives met which fate."""

    sites: tuple[dict[str, int], ...]
    errors: tuple[Error, ...]


def run_cell(rank: int, world_size: int, *, cell: Cell) -> Result:
    """The cell on this rank."""
    setting = Setting(
        rank=rank, world_size=world_size, rounding=cell.dtype, dtype=cell.dtype, batch=cell.batch, trains=cell.trains
    )
    build = ZOO[cell.model]
    truth = _measure(build, replace(setting, dtype=torch.float64))
    eager = _measure(build, setting)
    graphs: list[dict[str, int]] = []
    fusion = FusionPass(Options(fuse="always"))
    fusion.listen(lambda _, sites: graphs.append(fates(sites)))
    backend = partial(_BACKENDS[cell.how], fusion=fusion)
    compiled = _measure(build, setting, lambda module: torch.compile(module, backend=backend, fullgraph=True))
    errors = tuple(_error(name, truth[name], eager[name], compiled[name]) for name in truth)
    return Result(sites=tuple(graphs), errors=errors)


def run_wrong_cell(rank: int, world_size: int, *, cell: Cell) -> Result:
    """The cell with one number of every fused operator's result a tenth too large: what the judge must notice."""

    def wrong(call: Call) -> Any:
        result = call.reference()
        first = result if isinstance(result, Tensor) else result[0]
        first.view(-1)[0] += 0.1 * first.abs().max()
        return result

    set_launcher(wrong)
    try:
        return run_cell(rank, world_size, cell=cell)
    finally:
        install()


def fates(sites: Sequence[Site]) -> dict[str, int]:
    """How many sites: by fused operator, else by `kind: REASON`."""
    return dict(Counter(_fate(site) for site in sites))


def _fate(site: Site) -> str:
    if site.operator is not None:
        return site.operator
    assert site.reason is not None
    return f"{site.kind}: {site.reason.name}"


def _measure(
    build: Builder, setting: Setting, wrap: Callable[[Any], Callable[..., Any]] | None = None
) -> dict[str, Tensor]:
    """The output and every gradient, in fp64; of DTensors the whole tensor."""
    instance = build(setting)
    call = wrap(instance.module) if wrap else instance.module
    if not setting.trains:
        with torch.no_grad():
            return {"output": _whole(instance.outputs(call))}
    output = instance.outputs(call)
    (output * setting.draw(*output.shape, seed=90)).sum().backward()
    return {"output": _whole(output), **_gradients(instance)}


def _gradients(instance: Instance) -> dict[str, Tensor]:
    named = [*instance.module.named_parameters(), *((f"input {i}", x) for i, x in enumerate(instance.inputs))]
    return {f"d {name}": _whole(tensor.grad) for name, tensor in named if tensor.grad is not None}


def _whole(tensor: Tensor) -> Tensor:
    """The whole of a DTensor; of packed columns this rank's own, which torch 2.11 can't put together."""
    if isinstance(tensor, DTensor):
        is_packed = any(isinstance(one, _StridedShard) for one in tensor.placements)
        tensor = tensor.to_local() if is_packed else tensor.full_tensor()
    return tensor.detach().double()


def _error(name: str, truth: Tensor, eager: Tensor, compiled: Tensor) -> Error:
    by_eager, by_compiled = eager - truth, compiled - truth
    return Error(
        name=name,
        finite=bool(compiled.isfinite().all()),
        eager_worst=by_eager.abs().max().item(),
        eager_rms=_rms(by_eager),
        compiled_worst=by_compiled.abs().max().item(),
        compiled_rms=_rms(by_compiled),
        scale_worst=truth.abs().max().item(),
        scale_rms=_rms(truth),
    )


def _rms(tensor: Tensor) -> float:
    return tensor.square().mean().sqrt().item()


def _patches(fusion: FusionPass) -> dict[str, Any]:
    return {"post_grad_custom_pre_pass": fusion, "fx_graph_cache": False}


def _run_graphs(gm: fx.GraphModule, example_inputs: Sequence[Any], *, fusion: FusionPass, **_: Any) -> Any:
    """A backend: all that Inductor does up to and including its post-grad passes, then the graphs as they are."""
    return compile_fx(gm, example_inputs, inner_compile=_graph_runner, config_patches=_patches(fusion))


def _run_inductor(gm: fx.GraphModule, example_inputs: Sequence[Any], *, fusion: FusionPass, **_: Any) -> Any:
    return compile_fx(gm, example_inputs, config_patches=_patches(fusion))


_BACKENDS = {"graphs": _run_graphs, "inductor": _run_inductor}


def _graph_runner(gm: fx.GraphModule, example_inputs: Sequence[Any], **settings: Any) -> Callable[[list[Any]], Any]:
    view_to_reshape(gm)
    with torch.no_grad():
        fake_mode = fake_tensor_prop(gm, example_inputs)
    with V.set_fake_mode(fake_mode):
        post_grad_passes(gm, settings.get("is_inference", False))
    gm.recompile()

    def run(args: list[Any]) -> Any:
        values = list(args)
        args.clear()
        return gm(*values)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
