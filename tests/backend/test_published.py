"""What decisions depend on besides the graph is what rank 0 sees, told at the backend's entry, also on cache hits."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed import _functional_collectives as funcol

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


def rank_0_stays_away(rank: int, world_size: int) -> tuple[str, float]:
    if rank == 0:
        return "", 0.0
    started = time.monotonic()
    try:
        torch.compile(row_parallel, backend="mkernel", options=ALWAYS)(torch.ones(16, 8), torch.ones(8, 16))
    except Exception as error:  # Dynamo wraps what a backend raises
        return f"{error}", time.monotonic() - started
    return "nothing", 0.0


def test_all_ranks_plan_from_what_rank_0_sees_also_on_cache_hits(tmp_path: Path) -> None:
    run = partial(run_cases, {"told": ranks_that_see_different_machines}, 2)
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    cold, warm = (run(environment=environment).values("told") for _ in range(2))
    assert [(one.link_gbps, one.num_calls) for one in [*cold, *warm]] == [(100.0, 1)] * 4
    assert all(one.from_cache for one in warm)


def test_a_rank_0_that_does_not_come_is_named_in_time() -> None:
    environment = {"MKCOMPILE_TIMEOUT_S": str(DEADLINE_S)}
    _, (message, waited_s) = run_cases({"away": rank_0_stays_away}, 2, environment=environment).values("away")
    assert "AbsentRankError" in message and "rank 0" in message
    assert waited_s == pytest.approx(DEADLINE_S, abs=30.0)  # Dynamo is in it
