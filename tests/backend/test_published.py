"""What decisions depend on besides the graph is what rank 0 sees, told at the backend's entry, also on cache hits."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.backend.calls import ALWAYS, watched_calls
from tests.spawn import run_cases

# A rank waits so long for rank 0.
DEADLINE_S = 3.0


@dataclass(frozen=True, slots=True)
class Told:
    """What one rank plans from after it has compiled, and how it came to its graph."""

    link_gbps: float
    from_cache: bool
    num_calls: int


def row_parallel(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_reduce(x @ w, "sum", "0")


def see(link_gbps: float) -> None:
    """From now on this rank's own look at the machine finds links of this speed."""
    from mkcompile.plan.topology import preset
    from mkcompile.runtime import machine
    from mkcompile.runtime.published import Basis

    machine.own_basis = lambda: Basis(topology=replace(preset("2xh200"), nvlink_gbps=link_gbps))


def ranks_that_see_different_machines(rank: int, world_size: int) -> Told:
    from mkcompile.runtime.machine import basis_of

    see(100.0 + rank)
    counters.clear()
    with torch.no_grad(), watched_calls() as calls:
        torch.compile(row_parallel, backend="mkernel", options=ALWAYS)(torch.ones(16, 8), torch.ones(8, 16))
    return Told(
        link_gbps=basis_of("probe").topology.nvlink_gbps,
        from_cache=counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"] > 0,
        num_calls=len(calls),
    )


def rank_0_comes_later(rank: int, world_size: int) -> tuple[str, float, int]:
    """Rank 1 finds nobody; when rank 0 has come, both compile. First it takes a norm of its shard, for its log."""
    message, waited_s = "", 0.0
    if rank == 1:
        shard = DTensor.from_local(torch.arange(4.0), init_device_mesh("cpu", (world_size,)), [Shard(0)])
        norm = torch.compile(lambda one: (one * 2).to_local().square().sum(), backend="mkernel", options=ALWAYS)
        assert norm(shard) == 56.0
        started = time.monotonic()
        try:
            torch.compile(row_parallel, backend="mkernel", options=ALWAYS)(torch.ones(16, 8), torch.ones(8, 16))
        except Exception as error:  # Dynamo wraps what a backend raises
            message, waited_s = f"{error}", time.monotonic() - started
    else:
        init_device_mesh("cpu", (world_size,))
    dist.barrier()
    torch._dynamo.reset()
    with torch.no_grad(), watched_calls() as calls:
        torch.compile(row_parallel, backend="mkernel", options=ALWAYS)(torch.ones(16, 8), torch.ones(8, 16))
    return message, waited_s, len(calls)


def stages_of_a_pipeline(rank: int, world_size: int) -> tuple[list[int], float, str]:
    """Ranks 0 and 2 are the first stage, 1 and 3 the second, which compiles before the first has come."""
    from mkcompile.runtime.machine import basis_of

    see(100.0 + rank)
    stages = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    group = stages[rank % 2].group_name

    def stage(x: Tensor, w: Tensor) -> Tensor:
        return funcol.all_reduce(x @ w, "sum", group)

    if rank % 2 == 0:
        dist.recv(torch.empty(1), src=rank + 1)
    with torch.no_grad(), watched_calls() as calls:
        torch.compile(stage, backend="mkernel", options=ALWAYS)(torch.ones(16, 8), torch.ones(8, 16))
    if rank % 2:
        dist.send(torch.ones(1), dst=rank - 1)
    return [len(calls)], basis_of("probe", group).topology.nvlink_gbps, str(basis_of("probe", group).placement)


def test_each_stage_of_a_pipeline_asks_its_own_ranks_only() -> None:
    environment = {"MKCOMPILE_TIMEOUT_S": "60"}
    told = run_cases({"stages": stages_of_a_pipeline}, 4, environment=environment).values("stages")
    assert told == [([1], 100.0, "1x2"), ([1], 101.0, "1x2"), ([1], 100.0, "1x2"), ([1], 101.0, "1x2")]


def test_all_ranks_plan_from_what_rank_0_sees_also_on_cache_hits(tmp_path: Path) -> None:
    run = partial(run_cases, {"told": ranks_that_see_different_machines}, 2)
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    cold, warm = (run(environment=environment).values("told") for _ in range(2))
    assert [(one.link_gbps, one.num_calls) for one in [*cold, *warm]] == [(100.0, 1)] * 4
    assert all(one.from_cache for one in warm)


def test_a_rank_0_that_does_not_come_is_named_in_time_and_may_come_later() -> None:
    environment = {"MKCOMPILE_TIMEOUT_S": str(DEADLINE_S)}
    ranks = run_cases({"later": rank_0_comes_later}, 2, environment=environment).values("later")
    message, waited_s, _ = ranks[1]
    assert "AbsentRankError" in message and "rank 0" in message
    assert waited_s == pytest.approx(DEADLINE_S, abs=30.0)  # Dynamo is in it
    assert [num_calls for *_, num_calls in ranks] == [1, 1]
