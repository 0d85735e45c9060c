"""Which kernels exist: what a plan for a real machine may choose from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mkcompile.plan.candidates import TILES
from mkcompile.plan.decide import Policy
from mkcompile.plan.gather import GATHER_TILES, SHARED_TILES, gather_stream_forms
from mkcompile.plan.plan import Plan, Roles, Tile
from mkcompile.plan.stream import stream_forms, transport_of, ways_of

#: Those that add what they reduce to a residual in place, inside a node.
ADDING = frozenset({"gemm_reduce_scatter/push", "gemm_all_reduce/staged"})
#: As `operator/variant`, for `Policy.available`. Results that stay in their graph are stored `direct`.
AVAILABLE = frozenset(
    {
        "gemm_reduce_scatter/push", "gemm_reduce_scatter/stream", "gemm_all_reduce/staged", "gemm_all_reduce/stream",
        "all_gather_gemm/push", "all_gather_gemm/copy_engine", "all_gather_gemm/library",
        "all_gather_gemm/remote_read", "all_gather_gemm/pull", "all_gather_gemm/stream",
    }
)  # fmt: skip

#: All-gathers whose transfers, which are launched first, wait for a kernel that is launched after them.
_FED_BY_COPY_ENGINE = frozenset({"all_gather_gemm/copy_engine", "all_gather_gemm/library"})


def launchable(launches_block: bool) -> frozenset[str]:
    """The kernels that can run; where a launch waits for the end of the one before, none that the copy engine feeds."""
    return AVAILABLE - _FED_BY_COPY_ENGINE if launches_block else AVAILABLE


def plans_of_kernels(operator: str, across_nodes: bool) -> Iterator[Plan]:
    """A plan for each kernel that candidates for the operator are of, whatever the sizes; roles mean nothing.

    From the lists that `candidates` goes through. How a gather's rows move makes no other kernel.
    """
    gathers = operator == "all_gather_gemm"
    variant = "staged" if operator == "gemm_all_reduce" else "push"
    for tile in GATHER_TILES if gathers else TILES:
        yield _plan(operator, variant, tile)
    if across_nodes:
        return
    for tile in SHARED_TILES if gathers else ():
        yield _plan(operator, variant, tile, split=2)
    for tile, split in gather_stream_forms() if gathers else stream_forms():
        for way in ways_of(operator, tile, split):
            yield _plan(operator, "stream", tile, split=split, transport=transport_of(way))


def _plan(operator: str, variant: str, tile: Tile, **how: Any) -> Plan:
    given: dict[str, Any] = {"transport": "store", **how}
    return Plan(
        operator=operator, variant=variant, world_size=2, tile=tile, stages=2, roles=Roles(compute=1), lag=1, **given
    )


#: What is planned where nobody says otherwise.
EXISTING = Policy(available=AVAILABLE)
