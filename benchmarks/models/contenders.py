"""Who takes part: how each contender's call is made, and what is learnt while it compiles."""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import clear_caches

from mkcompile.backend import mkernel

from .cells import VARIANT

Call = Callable[[Tensor], Tensor]


class CollectiveCounter(CustomGraphPass):
    """Counts our operators and the collectives that are left, in every graph that is compiled (not in cached ones)."""

    def __init__(self) -> None:
        self.operators: Counter[str] = Counter()
        self.left: Counter[str] = Counter()

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            in_place = node.target is torch.ops.higher_order.auto_functionalized_v2
            target = node.args[0] if in_place else node.target
            if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
                continue
            name = target._schema.name
            if name.startswith("mkcompile::"):
                self.operators[name.removeprefix("mkcompile::")] += 1
            elif name.startswith("_c10d_functional::") and not name.endswith("::wait_tensor"):
                self.left[name.removeprefix("_c10d_functional::")] += 1

    def sums(self) -> tuple[int, int]:
        """How many operators of ours, and how many collectives that are left, so far."""
        return self.operators.total(), self.left.total()

    def uuid(self) -> str:
        """It changes nothing: a constant."""
        return "benchmarks.models.contenders.CollectiveCounter"


@dataclass(slots=True)
class GraphSwitch:
    """Whether what was compiled for CUDA graphs is captured and replayed, or called as it is. `traced`: captured once
    more, with kernels that write their timelines, since a graph keeps the kernels that it was captured with.
    """

    on: bool = True
    traced: bool = False

    @contextmanager
    def with_timelines(self) -> Iterator[None]:
        """What is captured and replayed meanwhile."""
        self.traced = True
        try:
            yield
        finally:
            self.traced = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """What Inductor compiles meanwhile asks this switch at each call."""
        inductor = importlib.import_module("torch._inductor.compile_fx")
        capturing: Callable[..., Callable[[Any], Any]] = inductor.cudagraphify

        def cudagraphify(model: Callable[[Any], Any], *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
            captured, with_timelines = (capturing(model, *args, **kwargs) for _ in range(2))  # at their first calls

            def call(inputs: Any) -> Any:
                if not self.on:
                    return model(inputs)
                return with_timelines(inputs) if self.traced else captured(inputs)

            return call

        with mock.patch.object(inductor, "cudagraphify", cudagraphify):
            yield


@dataclass(slots=True, kw_only=True)
class Contender:
    """One contender of a cell. `compiled` is called by Dynamo when a graph is ready, before its first run.

    `graphs`: compiled for CUDA graphs, and called with or without. `cache`: a folder for what is compiled, None for
    the user's. `keeps`: graphs are kept, too, so that a second compilation is a warm one; else kernels only, and a
    graph is compiled each time. `options`: ours, as given to `torch.compile`.
    """

    name: str
    module: nn.Module
    graphs: bool
    cache: Path | None
    keeps: bool
    options: dict[str, str]
    compiled: Callable[[], None]
    counter: CollectiveCounter = field(default_factory=CollectiveCounter)
    switch: GraphSwitch = field(default_factory=GraphSwitch)
    _call: Call | None = None

    def call(self, graphs: bool) -> Call:
        """The module as this contender runs it, with or without CUDA graphs."""
        if self.name == "eager":
            return self.module
        if self._call is None:
            self._call = torch.compile(self.module, backend=self._backend, fullgraph=True, dynamic=False)
        call = self._call
        if not self.graphs:
            return call

        def plain(x: Tensor) -> Tensor:
            self.switch.on = False
            return call(x)

        def stepped(x: Tensor) -> Tensor:
            self.switch.on = True
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            return call(x)

        return stepped if graphs else plain

    def _backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        options: dict[str, Any] = {"triton.cudagraphs": self.graphs}
        if self.name in ("mkernel", VARIANT):
            graph = mkernel(gm, example_inputs, options=options | self.options)
        else:
            options["_micro_pipeline_tp"] = self.name == "async_tp"
            graph = compile_fx(gm, example_inputs, config_patches=options)  # type: ignore[assignment]
        self.compiled()
        return graph

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """With these caches; backward is compiled with forward."""
        patches = {"post_grad_custom_post_pass": self.counter, "fx_graph_cache": self.keeps}
        with (
            caches_in(self.cache) if self.cache is not None else nullcontext(),
            self.switch.installed(),
            inductor_config.patch(patches),
            torch._functorch.config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=self.keeps),
        ):
            yield


@contextmanager
def caches_in(folder: Path) -> Iterator[None]:
    """Inductor and Triton keep what they compile in this folder."""
    names = {"TORCHINDUCTOR_CACHE_DIR": folder / "inductor", "TRITON_CACHE_DIR": folder / "triton"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update({name: str(path) for name, path in names.items()})
    clear_caches()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def first_compilation(device: str, folder: Path) -> None:
    """What the first compilation of a process costs belongs to no contender: imports, compile workers."""
    with caches_in(folder):
        torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=device))
    torch._dynamo.reset()
