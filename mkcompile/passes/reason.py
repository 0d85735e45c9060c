"""Why a collective was left as it was. Every sentence says what the user can do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Reason(Enum):
    """One reason a site is not fused; the value is the sentence that `explain` prints."""

    NO_GEMM = (
        "no GEMM feeds or follows this collective, so there is nothing to overlap it with; "
        "nothing to do unless a matmul was expected here"
    )
    COLLECTIVE_KIND = (
        "only all-reduce, reduce-scatter and all-gather of single tensors are fused with the products beside them; "
        "use those for tensor parallelism"
    )
    RANKS_DIFFER = (
        "the ranks send each other different amounts, so that each may have another graph, and what is fused must be "
        "the same on all; make the parts equal if the model allows it"
    )
    UNEVEN_SHARDS = (
        "the ranks have different sizes of a dimension of this product, so that each would launch another kernel; "
        "pad that dimension (a vocabulary, say) to a multiple of the ranks"
    )
    REDUCE_OP = "only sum and avg can be fused; reduce with one of them if the model allows it"
    WORLD_SIZE_ONE = "the group has one rank, so there is nothing to communicate; drop the parallelism for this axis"
    CPP_WRAPPER = (
        "Inductor's C++ wrapper can't call this operator, which returns a list of tensors; "
        "compile without the option cpp_wrapper"
    )
    FX_WRAPPER = (
        "Inductor's FX wrapper can't write the check of alignment behind an operator; "
        "compile with the option alignment_asserts=False"
    )
    GROUP_IS_NODE = (
        "the process group is a value of the graph and not a name; "
        "compile with torch.distributed.config.compile_on_one_rank=False"
    )
    POLICY_NEVER = "mkernel.fuse is 'never'; set it to 'auto' or 'always'"
    NO_GAIN = "the planner predicts no gain for this size; set mkernel.fuse='always' to fuse it all the same"
    DTYPE = (
        "no fused kernel takes this dtype; use bfloat16 or float16 "
        "(with mkernel.fuse='always' float32 and scaled float8 run as their references, no faster)"
    )
    TINY_PAYLOAD = (
        "the payload is so small that signalling costs more than the overlap saves; "
        "batch more tokens, or set mkernel.fuse='always'"
    )
    LAYOUT = (
        "no kernel takes these weights; make n and k multiples of 8, "
        "and give all weights of one site one layout, [n, k] or [k, n]"
    )
    WEIGHT_PRODUCT = (
        "only weight gradients read the gathered tensor, and no kernel makes them while its rows arrive; "
        "nothing to do unless another product of it is in the same graph"
    )
    SHAPE = "no kernel takes this shape; make the rows divisible by the ranks, and scatter or gather rows, not columns"
    NO_P2P = (
        "GPUs of this group can't reach each other's memory; `python -m mkcompile doctor` shows which, and what to do"
    )
    NO_NETWORK_KERNEL = (
        "the group spans nodes and there is no fused kernel for that; keep this axis of parallelism inside a node"
    )
    UNEVEN_NODES = (
        "the group has more ranks on one node than on another, so that its ranks have no peers of their own there; "
        "give it equally many ranks on each node"
    )
    TOO_MANY_RANKS = (
        "the group has more ranks than fused kernels join, on one node or over several; "
        "keep this axis of parallelism within 16 ranks"
    )
    NO_KERNEL = (
        "there is no fused kernel for this operator on this GPU; `python -m mkcompile doctor` says what it needs"
    )
    PRODUCT_USED_ELSEWHERE = (
        "the product before the reduction is used elsewhere, so it has to exist unreduced; "
        "use the collective's result there, if that is what was meant"
    )
    PRODUCT_SAVED = (
        "the product before the reduction leaves the graph, as where selective checkpointing saves matmuls; "
        "make it save the collective (torch.ops._c10d_functional.all_reduce.default) as well, which takes the "
        "product's place"
    )
    OP_BETWEEN = (
        "an operation between the product and the reduction does not commute with the reduction; "
        "apply it after the collective if the result may change so"
    )
    ADDEND_NOT_GEMM = (
        "something that is no product is added before the reduction; add it after the collective, divided accordingly"
    )
    BIAS_SHAPE = "only a bias of one value for each column can be fused; give it the shape [N]"
    SEVERAL_BIASES = "several biases are added before one reduction; add them up first, or keep one"
    GEMM_SCALED = "addmm with alpha or beta other than 1 can't be fused; scale the input or the bias instead"
    GEMM_KIND = "batched and grouped products beside a collective are not fused; use 2-D matmuls, plain or scaled"
    SCALES = (
        "a scaled product is fused with one float32 scale for each operand, or one for each row of the input and each "
        "column of the weight, and with no scale of the result; use such scales"
    )
    SCALES_GATHERED = (
        "what is gathered are scales, a few bytes beside the tensor that they belong to; "
        "scale whole tensors and not rows if this collective matters"
    )
    CAST_BEFORE_REDUCTION = (
        "the product is cast to another dtype before the reduction; reduce in the product's own dtype and cast after it"
    )
    SCALE_MAY_OVERFLOW = (
        "a float16 product is scaled down before the reduction, which protects the sum from overflow; "
        "use bfloat16, or scale after the collective"
    )
    UNEQUAL_PRODUCTS = "the products that are added up differ in shape or dtype; give them the same rows and columns"
    UNEVEN_SCATTER = "the ranks' slices have different sizes or are padded; make the size divisible by the group"
    SCATTER_SHAPE = (
        "the slices that are scattered are not blocks of rows or of columns of the product; "
        "scatter along a dimension that the matmul leaves whole"
    )
    RESULT_UNUSED = "nothing uses the result of this collective; remove it"
    USED_BEFORE_WAIT = (
        "the collective's result is used otherwise than through one wait; wait once and use what that returns"
    )
    UNEVEN_GATHER = "the gathered shards are padded or cut to size; make the size divisible by the group"
    GATHERED_IN_TWO_ORDERS = (
        "the gathered tensor is used as gathered along two different dimensions; gather along one and transpose"
    )
    GATHER_REGROUPED = (
        "the GEMM reads the gathered tensor with other columns than the shards have; "
        "reshape the shard before the gather"
    )
    OP_BEFORE_GEMM = (
        "an operation stands between the gather and the GEMM; "
        "apply it to the shard, before the gather, if it works row by row"
    )
    GEMM_BEFORE_GATHER = (
        "a GEMM makes what is gathered, and only GEMMs that read the gathered tensor are fused; "
        "keep its output sharded if the next operation allows it"
    )
    PARAMETER_GATHER = (
        "what is gathered is an input of the graph and read as a weight, as under fully sharded data parallelism, "
        "which prefetches it; nothing to do, unless it is no parameter: then make it inside the compiled function"
    )
    DEPENDENT_GEMMS = (
        "the other operand of every GEMM that reads the gathered tensor is itself made from that tensor; nothing to do"
    )
    ACTIVATION_UNKNOWN = (
        "the function between the two products of this feed-forward network is no known activation; "
        "use relu, relu squared, gelu (erf or tanh) or silu, gated or not"
    )
    FFN_INPUTS_DIFFER = (
        "the gate and up products of this feed-forward network read different inputs; give them the same input"
    )
    FFN_GATHER_GROUP = (
        "the feed-forward network gathers over one group and reduces over another; use one group for both"
    )
    DEPENDENCY_CYCLE = (
        "the GEMMs of this site depend on each other through other nodes; fusing them would make a cycle; "
        "compute the weights before the collective"
    )
    OVERLAPS_BETTER_SITE = "part of it belongs to another site whose predicted saving is larger; nothing to do"


class Residual(Enum):
    """What became of the addition of a residual behind a fused reduction; the value is what `explain` prints."""

    ADDED = "residual added in place"
    INPUT = "residual is an input of the graph"
    OUTPUT = "residual leaves the graph, or is saved for backward"
    READ_LATER = "residual is made or read after the reduction"
    OPERAND = "the product reads the residual"
    PART = "residual is part of another tensor"
    RESULT_READ = "the reduction's result is read elsewhere, too"
    SCALED = "the addition has a factor"
    DTYPE = "residual has another dtype"
    SHAPE = "the addition broadcasts"
    LAYOUT = "residual does not lie in order"
    SYMBOLIC = "the sizes are not known"
    KERNEL = "the kernel of this size does not add"
    PLANNED = "mkernel.results is 'planned'"
    APART = "mkernel.residuals is 'apart'"
    CPP_WRAPPER = "Inductor's C++ wrapper can't call such an operator"
    STREAMS = "the graph has streams of its own"

    @property
    def sentence(self) -> str:
        """For reports."""
        return self.value if self is Residual.ADDED else f"residual not added in place: {self.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """A reason, and the node or size that decided it."""

    reason: Reason
    detail: str = ""
