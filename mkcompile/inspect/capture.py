"""Compiles a model as the backend would, but generates no code and computes nothing.

Each graph is taken as it reaches the fusion pass and as it leaves it. What is returned to Dynamo in its place answers
with zeros of the right shape, so that Python goes on to the next graph and to backward; no kernel and no collective of
a captured graph runs. Code between graphs (after a graph break) does run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import getclosurevars, isfunction
from typing import Any, Literal

import torch
from torch import fx
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx as inductor
from torch._inductor import config as inductor_config
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves

from mkcompile.backend import FusionPass, inductor_patches, with_joint_pass, with_pass
from mkcompile.config import Options, split_options
from mkcompile.inspect import snapshot
from mkcompile.inspect.breaks import Ending, ending_of
from mkcompile.inspect.snapshot import GraphView
from mkcompile.passes import normalise
from mkcompile.passes.site import Site
from mkcompile.passes.uneven_shards import UnevenSizes, uneven_sizes

# A cache hit would skip the pass, and with it the report.
_NO_CACHE = {"fx_graph_cache": False, "fx_graph_remote_cache": False}

Phase = Literal["inference", "forward", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedGraph:
    """One graph before and after the pass, with what became of its collectives.

    `normalised` lies between: the sites' names are those of its nodes.
    """

    phase: Phase
    before: GraphView
    normalised: GraphView
    after: GraphView
    sites: tuple[Site, ...]


@dataclass(slots=True)
class Recorder:
    """Collects the graphs of one model; `backend` is what `torch.compile` gets.

    `endings` says how each of Dynamo's graphs ends.
    """

    options: Options
    patches: dict[str, Any]
    graphs: list[CapturedGraph] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)

    def backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        """Inductor down to its post-grad passes."""
        self.endings.append(ending_of(gm))
        inner = partial(self._inner_compile, uneven_sizes(gm))
        compiled = inductor.compile_fx(gm, example_inputs, inner_compile=inner)  # type: ignore[arg-type]
        assert callable(compiled)
        return compiled

    def _inner_compile(
        self, uneven: UnevenSizes, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Callable[..., Any]:
        """In the place of Inductor's code generation."""
        is_inference = bool(kwargs.get("is_inference", False))
        phase: Phase = "backward" if kwargs.get("is_backward") else "inference" if is_inference else "forward"
        watched = _WatchedPass(self.options, phase, uneven)
        view_to_reshape(gm)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            fake_mode = inductor.fake_tensor_prop(gm, example_inputs)
        results = [_result(one) for one in _outputs(gm)]
        patches = with_pass(self.patches, watched)
        # Backward is compiled under the mode of meta weights that are stood in for; its graph has a mode of its own.
        with unset_fake_temporarily(), V.set_fake_mode(fake_mode), inductor_config.patch(patches):
            inductor._recursive_post_grad_passes(gm, is_inference=is_inference)
        self.graphs.extend(watched.captured)
        return _answer(results)


class _WatchedPass(FusionPass):
    """The fusion pass with a look at the graph before it."""

    def __init__(self, options: Options, phase: Phase, uneven: UnevenSizes) -> None:
        super().__init__(options, uneven=uneven)
        self.captured: list[CapturedGraph] = []
        self._phase = phase
        self._before = self._normalised = GraphView(nodes=())
        self.listen(self._keep)

    def __call__(self, graph: fx.Graph) -> None:
        self._before = snapshot.take(graph)
        may_change = self._options.fuse != "never"
        if may_change and any(node.role == "collective" for node in self._before.nodes):
            normalise.run(graph)
        self._normalised = snapshot.take(graph)
        super().__call__(graph)

    def _keep(self, graph: fx.Graph, sites: list[Site]) -> None:
        self.captured.append(
            CapturedGraph(
                phase=self._phase,
                before=self._before,
                normalised=self._normalised,
                after=snapshot.take(graph),
                sites=tuple(sites),
            )
        )


def _answer(results: list[Callable[[], Any]]) -> Callable[[list[Any]], list[Any]]:
    """Stands for the compiled graph: returns zeros of the outputs' shapes."""

    def answer(inputs: list[Any]) -> list[Any]:
        inputs.clear()
        return [result() for result in results]

    answer._boxed_call = True  # type: ignore[attr-defined]
    return answer


def _outputs(gm: fx.GraphModule) -> list[Any]:
    (outputs,) = gm.graph.output_node().args
    assert isinstance(outputs, (list, tuple))
    return [one.meta.get("val") if isinstance(one, fx.Node) else one for one in outputs]


def _result(value: Any) -> Callable[[], Any]:
    """How to make one output, from its fake value."""
    if isinstance(value, torch.Tensor):
        shape, strides = [_number(s) for s in value.shape], [_number(s) for s in value.stride()]
        dtype, device = value.dtype, value.device
        return lambda: torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_()
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        number = value.node.hint
        return lambda: number
    return lambda: value


def _number(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def recorder(options: dict[str, Any] | None, mode: str | None) -> Recorder:
    """A recorder for what `torch.compile(options=..., mode=...)` would be given.

    Raises: OptionError.
    """
    ours, theirs = split_options(options)
    return Recorder(options=ours, patches=with_joint_pass(inductor_patches(theirs, mode), ours))


def compiled_with(model: Callable[..., Any]) -> tuple[dict[str, Any] | None, str | None]:
    """The options and the mode that a model was compiled with by this backend; None where it was not, or without."""
    wrapper: Any = innermost_backend(_callback(model))
    if getattr(wrapper, "compiler_name", "") != "mkernel":
        return None, None
    return wrapper.kwargs.get("options"), wrapper.kwargs.get("mode")


def _callback(model: Callable[..., Any]) -> Any:
    """What Dynamo calls for a compiled module, for one whose `compile` was called, or for a compiled function."""
    if isinstance(model, OptimizedModule):
        return model.dynamo_ctx.callback
    compiled = model._compiled_call_impl if isinstance(model, torch.nn.Module) else model
    if not isfunction(compiled) or not hasattr(compiled, "_torchdynamo_orig_callable"):
        return None
    return getclosurevars(compiled).nonlocals.get("callback")


def compile_and_run(
    record: Recorder, model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, backward: bool
) -> None:
    """Call the model once, compiled by the recorder, and its backward where its result asks for gradients.

    Dynamo is reset before and after: models that are compiled already compile again on their next call. No `.grad`
    is touched.
    """
    torch._dynamo.reset()
    with inductor_config.patch({**record.patches, **_NO_CACHE}), functorch_config.patch(enable_autograd_cache=False):
        result = torch.compile(_uncompiled(model), backend=record.backend)(*args, **kwargs)
        wanted = _results_to_differentiate(result) if backward else []
        inputs = [one for one in _tensors((args, kwargs, _parameters(model))) if one.requires_grad]
        if wanted and inputs:
            torch.autograd.grad(wanted, inputs, [torch.zeros_like(one) for one in wanted], allow_unused=True)


def _uncompiled(model: Callable[..., Any]) -> Callable[..., Any]:
    """A module whose `compile` was called would run what that made; Dynamo itself unwraps what `torch.compile` made."""
    if isinstance(model, torch.nn.Module) and model._compiled_call_impl is not None:
        return model._call_impl
    return model


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _parameters(model: Callable[..., Any]) -> list[torch.Tensor]:
    return list(model.parameters()) if isinstance(model, torch.nn.Module) else []


def _results_to_differentiate(result: Any) -> list[torch.Tensor]:
    """The loss where the result names one (as Hugging Face models do), else every result that has a gradient."""
    loss = result.get("loss") if isinstance(result, Mapping) else None
    return [one for one in _tensors(result if loss is None else loss) if one.requires_grad]
