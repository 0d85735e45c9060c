"""Why a collective was left as it was. Every sentence says what the user can do about it."""

from __future__ import annotations

from enum import Enum


class Reason(Enum):
    """One reason a site is not fused; the value is the sentence that `explain` prints."""

    NO_GEMM = (
        "no GEMM feeds or follows this collective, so there is nothing to overlap it with; "
        "nothing to do unless a matmul was expected here"
    )
    REDUCE_OP = "only sum and avg can be fused; other reductions stay as they are"
    WORLD_SIZE_ONE = "the group has one rank, so there is nothing to communicate; drop the parallelism for this axis"
    GROUP_IS_NODE = (
        "the process group is a value of the graph and not a name; "
        "compile with torch.distributed.config.compile_on_one_rank=False"
    )
    POLICY_NEVER = "mkernel.fuse is 'never'; set it to 'auto' or 'always'"
    NO_GAIN = "the planner predicts no gain for this size; set mkernel.fuse='always' to fuse it all the same"
    DTYPE = "this dtype can't be fused; use bfloat16, float16 or float32"
    PRODUCT_USED_ELSEWHERE = "the product before the reduction is used elsewhere, so it has to exist unreduced"
    DEPENDENCY_CYCLE = (
        "the GEMMs of this site depend on each other through other nodes; fusing them would make a cycle; "
        "compute the weights before the collective"
    )
    OVERLAPS_BETTER_SITE = "part of it belongs to another site whose predicted saving is larger"
