"""Post-grad graphs of a function or module under a fake process group: before our pass, after it, and its report.

No code is generated: Dynamo, AOTAutograd and Inductor's post-grad passes run, and the graphs are interpreted.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx as inductor
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.virtualized import V
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from mkcompile.passes.fuse import Judge, anywhere, fuse, fuse_all
from mkcompile.passes.site import Site
from tests.lockstep import World, run


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """One graph. `phase` is inference, forward or backward."""

    phase: str
    before: fx.GraphModule
    after: fx.GraphModule
    sites: list[Site]

    @property
    def operators(self) -> Counter[str]:
        """How many collectives went into each operator; those left alone count under their reason's name."""
        return Counter(site.operator or (site.reason.name if site.reason else "?") for site in self.sites)

    @property
    def calls(self) -> Counter[str]:
        """The fused operators' calls in the rewritten graph."""
        return count(self.after.graph, "mkcompile")

    @property
    def left(self) -> Counter[str]:
        """The collectives in the rewritten graph."""
        found = count(self.after.graph, "_c10d_functional")
        return Counter({name: number for name, number in found.items() if name != "wait_tensor"})


def count(graph: fx.Graph, namespace: str) -> Counter[str]:
    """Calls of a namespace's operators, by name."""
    targets = [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return Counter(target._opname for target in targets if target.namespace == namespace)


@contextmanager
def fake_group(world_size: int) -> Iterator[str]:
    """A fake process group as rank 0; its name."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield dist.group.WORLD.group_name  # type: ignore[union-attr]
    finally:
        dist.destroy_process_group()


def capture(
    model: Callable[..., Any],
    *args: Any,
    backward: bool = False,
    dynamic: bool | None = None,
    judge: Judge = fuse_all,
    joint: CustomGraphPass | None = None,
    **fusing: Any,
) -> list[Captured]:
    """Compile and call the model (and its backward); the graphs in the order in which they were compiled.

    `joint` is a pass over the graph of forward and backward together; `fusing` goes to `fuse`.
    """
    torch._dynamo.reset()
    graphs: list[Captured] = []
    patches = inductor_config.patch(fx_graph_cache=False, joint_custom_pre_pass=joint)
    with patches, functorch_config.patch(enable_autograd_cache=False):
        keeper = partial(_Keeper, fusing={"judge": anywhere(judge), "results": "planned", **fusing})
        result = torch.compile(model, backend=_backend(graphs, keeper), dynamic=dynamic, fullgraph=True)(*args)
        if backward:
            leaves = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor) and one.requires_grad]
            torch.autograd.backward(leaves, [torch.ones_like(one) for one in leaves])
    return graphs


def capture_each(
    functions: Sequence[Callable[..., Any]], *args: Any, **fusing: Any
) -> tuple[Captured, dict[str, Site]]:
    """Functions with one collective each in one graph (compiling is slow), and what became of each function's."""

    def all_of_them(*args: Any) -> list[Any]:
        return [function(*args) for function in functions]

    (graph,) = capture(all_of_them, *args, **fusing)
    names = [function.__name__ for function in functions]
    return graph, dict(zip(names, graph.sites, strict=True))


def _backend(graphs: list[Captured], keeper_of: Callable[[str], _Keeper]) -> Callable[..., Any]:
    def inner_compile(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        is_inference = bool(kwargs.get("is_inference", False))
        phase = "backward" if kwargs.get("is_backward") else "inference" if is_inference else "forward"
        inductor.view_to_reshape(gm)
        with torch.no_grad():
            fake_mode = inductor.fake_tensor_prop(gm, example_inputs)
        keeper = keeper_of(phase)
        with V.set_fake_mode(fake_mode), inductor_config.patch(post_grad_custom_pre_pass=keeper):
            inductor._recursive_post_grad_passes(gm, is_inference=is_inference)
        graphs.append(keeper.kept)
        original = keeper.kept.before

        def interpret(inputs: list[Any]) -> Any:
            return original(*inputs)

        interpret._boxed_call = True  # type: ignore[attr-defined]
        return interpret

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        return inductor.compile_fx(gm, example_inputs, inner_compile=inner_compile)  # type: ignore[arg-type]

    return backend


class _Keeper(CustomGraphPass):
    def __init__(self, phase: str, fusing: dict[str, Any]) -> None:
        self._phase = phase
        self._fusing = fusing
        self.kept: Captured

    def __call__(self, graph: fx.Graph) -> None:
        before = _copy(graph)
        sites = fuse(graph, **self._fusing)
        graph.lint()
        self.kept = Captured(phase=self._phase, before=before, after=_copy(graph), sites=sites)

    def uuid(self) -> None:
        return None


def _copy(graph: fx.Graph) -> fx.GraphModule:
    copied = copy.deepcopy(graph.owning_module)
    assert copied is not None
    copied.recompile()
    return copied


def random_inputs(gm: fx.GraphModule, rank: int, seed: int = 0) -> list[Any]:
    """Small whole numbers for each placeholder, different on each rank; symbolic sizes by their hints.

    Sums of products of them are exact in every floating dtype, so results can be compared bit for bit.
    """
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    inputs: list[Any] = []
    for node in gm.graph.find_nodes(op="placeholder"):
        val = node.meta["val"]
        if isinstance(val, torch.Tensor):
            shape = [size if isinstance(size, int) else int(size.node.hint) for size in val.shape]
            whole = torch.randint(-2, 3, shape, generator=generator)
            strides = [stride if isinstance(stride, int) else int(stride.node.hint) for stride in val.stride()]
            inputs.append(torch.empty_strided(shape, strides, dtype=val.dtype).copy_(whole))
        elif isinstance(val, torch.SymInt):
            inputs.append(int(val.node.hint))
        else:
            inputs.append(val)
    return inputs


def assert_same_values(graph: Captured, world_size: int, tolerance: float = 0.0, seed: int = 0) -> None:
    """The rewritten graph computes on every rank what the original does; bit for bit where `tolerance` is 0.

    `tolerance` is relative to the largest absolute value of each output.
    """
    world = World(world_size)
    wanted = run(world, graph.before, lambda rank: random_inputs(graph.before, rank, seed))
    found = run(world, graph.after, lambda rank: random_inputs(graph.after, rank, seed))
    for rank, (one, other) in enumerate(zip(wanted, found, strict=True)):
        for i, (x, y) in enumerate(zip(tree_leaves(one), tree_leaves(other), strict=True)):
            if not isinstance(x, torch.Tensor):
                assert type(x) is type(y), (rank, i)
                continue
            assert x.shape == y.shape and x.dtype == y.dtype, (rank, i, x.shape, y.shape)
            assert torch.isfinite(x).all(), (rank, i)
            difference = float((x.double() - y.double()).abs().max()) if x.numel() else 0.0
            bound = tolerance * float(x.double().abs().max()) if x.numel() else 0.0
            assert difference <= bound, f"rank {rank}, output {i}: differs by {difference}, bound {bound}"
