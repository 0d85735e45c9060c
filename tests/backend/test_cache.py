"""The compile caches stay on, know nothing of the rank, and a hit needs no pass to have run."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

from tests.backend.calls import Layer
from tests.spawn import run_cases

HOOK = "post_grad_custom_post_pass"


@dataclass(frozen=True, slots=True)
class Run:
    """What one rank saw of one compile."""

    num_passes: int
    hits: int
    misses: int
    worst: float
    graphs: tuple[str, ...]
    calls: int


def compile_once(
    rank: int, world_size: int, *, turns: bool = False, backend: str = "mkernel", bake: bool = False
) -> Run:
    """Forward and backward against eager, each rank with its own weights and inputs.

    `turns`: rank 1 compiles after rank 0 has finished. `bake`: with a pass that puts the rank into the graph.
    """
    counters.clear()
    module = Layer()
    x = torch.randn(8, 16)
    want = values_and_gradients(module, module, x)
    graphs: list[str] = []
    from mkcompile.backend import Chain  # hooks of torch 2.11 take no lists

    patches: dict[str, Any] = {HOOK: Chain([BakesTheRank(rank), Reader(graphs)] if bake else [Reader(graphs)])}
    options: dict[str, Any] = {"mkernel.fuse": "always"}
    if backend == "inductor":
        import mkcompile

        options = {"post_grad_custom_pre_pass": mkcompile.FusionPass(mkcompile.Options(fuse="always"))}
    calls = count_calls()
    with inductor_config.patch(patches):
        compiled = torch.compile(module, backend=backend, fullgraph=True, options=options)
        if turns:
            with torch.no_grad():
                got_in_turn = compile_in_turns(rank, compiled, x)
            factor = rank + 1.0 if bake else 1.0
            return result([want[0] * factor], [got_in_turn], graphs, calls)
        return result(want, values_and_gradients(module, compiled, x), graphs, calls)


def compile_in_turns(rank: int, compiled: Any, x: Tensor) -> Tensor:
    """Compiles on rank 0 while rank 1 waits, then on rank 1; only then are there collectives in flight."""
    from torch.distributed.distributed_c10d import _get_process_group_store

    from mkcompile.runtime.machine import PROBE, enter

    assert dist.group.WORLD is not None
    enter(PROBE, [dist.group.WORLD.group_name])  # ranks tell each other of the machine before any of them compiles
    store = _get_process_group_store(dist.group.WORLD)
    if rank == 1:
        store.wait(["rank 0 has compiled"])
    done = partial(store.set, "rank 0 has compiled", "") if rank == 0 else lambda: None
    with at_first_launch(done):
        return compiled(x)


class at_first_launch:  # noqa: N801
    """While it holds, the first operator call on this rank does `what`: its graph is compiled by then."""

    def __init__(self, what: Any) -> None:
        self._what = what

    def __enter__(self) -> None:
        from mkcompile.ops import registry

        self._launcher = registry._REGISTRY.launcher
        pending = [self._what]

        def launch(call: Any) -> Any:
            if pending:
                pending.pop()()
            return self._launcher(call) if self._launcher else None

        registry.set_launcher(launch)

    def __exit__(self, *_: object) -> None:
        from mkcompile.ops import registry

        registry.set_launcher(self._launcher)


class Reader(CustomGraphPass):
    """Keeps the graphs' text; as a pass it only runs where nothing is hit."""

    def __init__(self, graphs: list[str]) -> None:
        self._graphs = graphs

    def __call__(self, graph: fx.Graph) -> None:
        self._graphs.append(str(graph))

    def uuid(self) -> str:
        return "reader"


class BakesTheRank(CustomGraphPass):
    """The planted fault: a constant of the rank in the graph, behind a uuid that does not know it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __call__(self, graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            if "mkcompile" in str(node.target):
                with graph.inserting_after(node):
                    scaled = graph.call_function(torch.ops.aten.mul.Tensor, (node, self._rank + 1.0))
                scaled.meta["val"] = node.meta["val"] * 1.0
                node.replace_all_uses_with(scaled, delete_user_cb=lambda user, made=scaled: user is not made)

    def uuid(self) -> str:
        return "bakes the rank"


def values_and_gradients(module: nn.Module, call: Any, x: Tensor) -> list[Tensor]:
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    out = call(leaf)
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in module.parameters()), leaf.grad.clone()]


def count_calls() -> list[str]:
    """The operator calls from now on: proof that the fused operators ran, pass or no pass."""
    calls: list[str] = []
    import mkcompile  # noqa: F401
    from mkcompile.ops import registry

    launcher = registry._REGISTRY.launcher

    def launch(call: Any) -> Any:
        calls.append(call.NAME)
        return launcher(call) if launcher else None

    registry.set_launcher(launch)
    return calls


def result(want: list[Tensor], got: list[Tensor], graphs: list[str], calls: list[str]) -> Run:
    inductor = counters["inductor"]
    autograd = counters["aot_autograd"]
    worst = max(float((a - b).abs().max()) for a, b in zip(want, got, strict=True))
    return Run(
        num_passes=len(graphs),
        hits=inductor["fxgraph_cache_hit"] + autograd["autograd_cache_hit"],
        misses=inductor["fxgraph_cache_miss"],
        worst=worst,
        graphs=tuple(graphs),
        calls=len(calls),
    )


def run_in(folder: Path, world_size: int = 2, **how: Any) -> list[Run]:
    """One run in fresh processes that share a cache folder."""
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(folder)}
    outcomes = run_cases({"run": partial(compile_once, **how)}, world_size, environment=environment)
    return outcomes.values("run")


def own_folders(rank: int, world_size: int, *, folder: Path) -> Run:
    """As compile_once, with a cache folder for each rank."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / f"rank{rank}")
    return compile_once(rank, world_size)


@pytest.mark.parametrize("backend", ["mkernel", "inductor"])
def test_second_process_hits_and_runs_the_fused_operators(tmp_path: Path, backend: str) -> None:
    cold = run_in(tmp_path, backend=backend)
    warm = run_in(tmp_path, backend=backend)
    assert [run.calls for run in [*cold, *warm]] == [2] * 4
    assert max(run.worst for run in [*cold, *warm]) < 1e-3
    assert cold[0].num_passes + cold[1].num_passes >= 2
    for run in warm:
        assert (run.num_passes, run.misses) == (0, 0)
        assert run.hits >= 1


def test_ranks_that_share_a_folder_get_right_results(tmp_path: Path) -> None:
    first, second = run_in(tmp_path, turns=True)
    assert (first.num_passes, second.num_passes) == (1, 0), "rank 1 should have hit what rank 0 compiled"
    assert second.hits >= 1
    assert first.worst < 1e-4 and second.worst < 1e-4


def test_a_planted_rank_in_the_graph_makes_the_test_above_fail(tmp_path: Path) -> None:
    first, second = run_in(tmp_path, turns=True, bake=True)
    assert (first.num_passes, second.num_passes) == (1, 0)
    # the cached graph has rank 0's constant, where rank 1's own would double its result
    assert first.worst < 1e-4
    assert second.worst > 1e-2


def test_graphs_hold_nothing_of_the_rank_and_cold_ranks_wait_for_no_warm_one(tmp_path: Path) -> None:
    case = {"run": partial(own_folders, folder=tmp_path)}
    cold = run_cases(case, 2).values("run")
    assert cold[0].graphs == cold[1].graphs and len(cold[0].graphs) == 2
    assert not any(word in text for text in cold[0].graphs for word in ("0x", "cuda:", "rank"))
    # rank 1 loses its cache: it compiles while rank 0 is at its first launch already
    shutil.rmtree(tmp_path / "rank1")
    warm, compiling = run_cases(case, 2).values("run")
    assert (warm.num_passes, compiling.num_passes) == (0, 2)
    assert warm.worst < 1e-3 and compiling.worst < 1e-3


def test_another_world_size_misses(tmp_path: Path) -> None:
    run_in(tmp_path, world_size=2)
    other = run_in(tmp_path, world_size=3)
    assert all(run.worst < 1e-3 for run in other)
    assert sum(run.num_passes for run in other) >= 2
