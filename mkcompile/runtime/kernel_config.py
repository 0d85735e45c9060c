"""`KernelConfig`: everything that a compiled kernel depends on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Literal

from mkcompile.errors import OperatorInputError
from mkcompile.runtime import gather_abi, network_abi

OperatorName = Literal["gemm", "gemm_reduce_scatter", "gemm_all_reduce", "all_gather_gemm"]
Broadcast = Literal["none", "direct", "staged", "multicast"]
DtypeName = Literal["bfloat16", "float16"]
WeightLayout = Literal["nk", "kn"]
#: How ranks lie on nodes: all on one; one on each of several; several on each of several.
Network = Literal["none", "flat", "hierarchical"]
Activation = Literal["none", "relu", "gelu_tanh", "gelu_erf", "silu"]

NUM_THREADS = 384
BLOCK_K = 64
_SHARED_LIMIT_BYTES = 232448
_FLAGS = {True: "true", False: "false"}
_ELEMENTS = {"bfloat16": "Bf16", "float16": "Fp16"}
_ACTIVATIONS = {"none": "kNone", "relu": "kRelu", "gelu_tanh": "kGeluTanh", "gelu_erf": "kGeluErf", "silu": "kSilu"}
#: Besides the image that a block moves. Source: ImageTile in csrc/device/gather_image.cuh.
_GATHER_SHARED_BYTES = 1040
_MOST_IMAGE_SLOTS = 4
_OPERATORS = {
    "gemm": "Gemm", "gemm_reduce_scatter": "GemmReduceScatter", "gemm_all_reduce": "GemmAllReduce",
    "all_gather_gemm": "AllGatherGemm",
}  # fmt: skip
_BROADCASTS = {"none": "kNone", "direct": "kDirect", "staged": "kStaged", "multicast": "kMulticast"}

#: Tiles (rows, columns) from the smallest to the largest.
TILES = (
    (64, 32), (64, 64), (64, 128), (64, 256),
    (128, 64), (128, 128), (128, 160), (128, 192), (128, 224), (128, 256),
)  # fmt: skip
#: Those that an all-gather kernel may have.
GATHER_TILES = tuple(tile for tile in TILES if tile not in ((64, 32), (128, 64)))
#: Those that two of its blocks may share: for others there are no registers, and stages for two k-blocks.
SHARED_GATHER_TILES = ((128, 128), (128, 160))
#: Tiles of the kernels for few rows, and among how many blocks of a cluster each may be shared.
STREAM_TILES = ((64, 32), (64, 64), (64, 128), (128, 32), (128, 64), (128, 128), (128, 256))
SPLITS = (1, 2, 4)
#: Those whose math groups may take turns: tiles that are long enough for it (decision 306).
PING_PONG = (((128, 128), 1), ((128, 128), 2), ((128, 64), 2), ((64, 128), 1))
#: The one of all-reduces whose clusters share only their first and last tile.
SHARES_ENDS = ((128, 128), 2)
#: Those of reductions whose partials are sent by two warps of their own.
HANDS_OVER = (((128, 128), 1), ((128, 64), 1), ((64, 128), 1), ((64, 64), 1))
#: Tiles and splits of the benchmarks' sweeps: those that were fastest somewhere.
STREAM_FORMS = tuple(product(((64, 64), (64, 128), (128, 64), (128, 128)), (1, 2)))


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """One kernel to compile. Problem sizes, strides, ranks and schedules are arguments of a launch, not of this.

    `stages` 0 takes as many as fit. `broadcast` is for `gemm_all_reduce`: finished tiles go `direct` into every
    rank's result, which then lies in memory that peers can write; `staged` through the workspace into any memory; or by
    `multicast` to one address behind which all results lie (compiled and inspected only: it has never run). With
    `trace` the kernel writes its timeline (`csrc/abi/trace.h`). `streams` is the form for few rows: one-shot, and each
    tile shared by the `split` blocks of a cluster; its math groups work on a tile together, or in turn (`ping_pong`),
    or together while two warps send the tile before (`hands_over`). With `shares_ends` a cluster of two shares only its
    first and last tile, and its blocks take turns with whole ones. `pulls`: blocks of a gather fetch rows. `returns`:
    the gathered rows are a result, too.

    Raises: OperatorInputError for a combination that does not exist.
    """

    operator: OperatorName = "gemm"
    block_m: int = 128
    block_n: int = 256
    stages: int = 0
    dtype: DtypeName = "bfloat16"
    weight_layout: WeightLayout = "nk"
    has_bias: bool = False
    activation: Activation = "none"
    broadcast: Broadcast = "none"
    trace: bool = False
    streams: bool = False
    split: int = 1
    ping_pong: bool = False
    hands_over: bool = False
    shares_ends: bool = False
    network: Network = "none"
    pulls: bool = False
    returns: bool = False

    def __post_init__(self) -> None:
        tiles = STREAM_TILES if self.streams else TILES
        if (self.block_m, self.block_n) not in tiles:
            raise OperatorInputError(f"no tile {self.block_m}x{self.block_n}; tiles: {tiles}")
        if self.pulls and not self._moves_images:
            raise OperatorInputError(f"{self.operator} fetches no images")
        if self.operator == "all_gather_gemm" and (self.ping_pong or self.hands_over):
            raise OperatorInputError("gathers of few rows multiply tiles together")
        if self.hands_over and not (self.streams and self.reduces and self.split == 1 and not self.ping_pong):
            raise OperatorInputError("only streaming reductions of whole tiles hand them over")
        if self.shares_ends and not (self.ping_pong and self.split == 2 and self.operator == "gemm_all_reduce"):
            raise OperatorInputError("only all-reduces of clusters of two whose groups take turns share their ends")
        if self.streams and self.block_n == 256 and (self.reduces or self.split > 1 or self.ping_pong):
            raise OperatorInputError("streaming kernels of 128x256 tiles are whole products: no registers for more")
        if self.ping_pong and not self.streams:
            raise OperatorInputError("only streaming kernels can be ping-pong")
        if (self.pulls or self.returns) and self.split > 1:
            raise OperatorInputError("blocks that fetch or return images do not share tiles")
        if self.returns and (self.pulls or not self._moves_images):
            raise OperatorInputError(f"{self.operator} returns no images")
        if self.split not in self._splits or self.group_n % (8 * self.split):
            raise OperatorInputError(f"{self.split} blocks can't share a tile of {self.block_m}x{self.block_n}")
        if self.network != "none" and (self.streams or not self.reduces):
            raise OperatorInputError(f"{self.operator} has no {'streaming ' * self.streams}kernel across nodes")
        if self.network != "none" and self.broadcast not in ("none", "staged"):
            raise OperatorInputError(f"finished tiles of other nodes are staged, not {self.broadcast}")
        if self.dtype not in _ELEMENTS:
            raise OperatorInputError(f"fused kernels take bfloat16 and float16, not {self.dtype}")
        if self.weight_layout not in ("nk", "kn"):
            raise OperatorInputError(f"a weight must be contiguous along n or k; layout {self.weight_layout!r}")
        if self.activation != "none" and self.operator != "gemm":
            raise OperatorInputError(f"{self.operator} has no activation")
        if (self.broadcast != "none") != (self.operator == "gemm_all_reduce" and not self.streams):
            raise OperatorInputError(f"{self.operator} can't have broadcast={self.broadcast!r}")
        if self.stages == 0:
            object.__setattr__(self, "stages", min(12, self._stages_that_fit()))
        if not 2 <= self.stages <= self._stages_that_fit():
            raise OperatorInputError(f"{self.stages} stages do not fit; at most {self._stages_that_fit()}")

    @property
    def reduces(self) -> bool:
        """Whether ranks take part together."""
        return self.operator != "gemm"

    @property
    def can_add(self) -> bool:
        """Whether a launch may add its result to what lies there, where it is told to."""
        whole_tiles = self.operator in ("gemm_reduce_scatter", "gemm_all_reduce") and not self.streams
        return whole_tiles and self.network == "none" and self.broadcast in ("none", "staged")

    @property
    def group_n(self) -> int:
        """Columns of one math group."""
        return self.block_n if self.block_m == 128 or self.ping_pong else self.block_n // 2

    @property
    def panel_n(self) -> int:
        """Columns of one panel, the unit of stores."""
        together = self.block_n if self.block_m == 128 else self.block_n // 2
        return next(columns for columns in (64, 32, 16) if together % columns == 0)

    @property
    def num_panels(self) -> int:
        """Panels of one math group."""
        return self.group_n // self.panel_n

    @property
    def tile_bytes(self) -> int:
        """Bytes of one staged tile."""
        return self.block_m * self.block_n * 2

    @property
    def _moves_images(self) -> bool:
        return self.operator == "all_gather_gemm" and self.network == "none" and not self.streams

    @property
    def _splits(self) -> tuple[int, ...]:
        if self.streams:
            return SPLITS
        return (1, 2) if self._moves_images and (self.block_m, self.block_n) in SHARED_GATHER_TILES else (1,)

    def _streaming_bytes(self, buffers: int) -> int:
        """`buffers`: of partials from the other blocks of the cluster."""
        slice_bytes = self.block_m * self.block_n * 4 // self.split
        handed_bytes = 2 * (self.tile_bytes + 2 * 8) if self.hands_over else 0
        return 1024 + buffers * (self.split - 1) * slice_bytes + handed_bytes + 11 * 8 + 16

    def _fixed_shared_bytes(self) -> int:
        if self.streams:  # two buffers where they cost no stage (StreamShape::kBuffers)
            two, stages = self._streaming_bytes(2), self.stages * self._stage_bytes()
            return two if stages and two + stages <= _SHARED_LIMIT_BYTES else self._streaming_bytes(1)
        spare_bytes = 2 * 64 * self.panel_n * 2 if self.broadcast == "staged" else 0
        copy_barriers = 2 + 2 * self.num_panels if self.broadcast == "staged" else 0
        barriers = 3 * 2 * self.num_panels + copy_barriers + 1
        gather_bytes = _GATHER_SHARED_BYTES + self._image_bytes if self._moves_images else 0
        if self.split > 1:  # panels of one group, and the other block's sums of it, in fp32 (SharedTileShape)
            return 1024 + self.tile_bytes // 2 + self.tile_bytes + (barriers + 2) * 8 + 16 + gather_bytes
        return 1024 + self.tile_bytes + spare_bytes + barriers * 8 + 16 + gather_bytes

    @property
    def _image_bytes(self) -> int:
        return self.block_m * BLOCK_K * 2

    @property
    def image_slots(self) -> int:
        """Images of a gather that a block moves at once: one, and what else there is room for."""
        free_bytes = _SHARED_LIMIT_BYTES - self._fixed_shared_bytes() - self.stages * self._stage_bytes()
        return min(_MOST_IMAGE_SLOTS, 1 + free_bytes // self._image_bytes)

    def _stage_bytes(self) -> int:
        operands, barriers, note = (self.block_m + self.block_n) * BLOCK_K * 2, 16, 8
        return operands + barriers + note

    def _stages_that_fit(self) -> int:
        return (_SHARED_LIMIT_BYTES - self._fixed_shared_bytes()) // self._stage_bytes()

    def with_tile(self, block_m: int, block_n: int) -> KernelConfig:
        """The same kernel with another tile and as many stages as fit."""
        return replace(self, block_m=block_m, block_n=block_n, stages=0)

    @cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory; the compiled source asserts the same number."""
        more_images_bytes = (self.image_slots - 1) * self._image_bytes if self._moves_images else 0
        return self._fixed_shared_bytes() + self.stages * self._stage_bytes() + more_images_bytes

    @cached_property
    def name(self) -> str:
        """A readable name, unique among configurations."""
        parts = [self.operator, f"{self.block_m}x{self.block_n}", f"s{self.stages}", self.dtype, self.weight_layout]
        parts += ["bias"] if self.has_bias else []
        parts += [part for part in (self.activation, self.broadcast) if part != "none"]
        parts += [f"stream{self.split}"] if self.streams else [f"shared{self.split}"] if self.split > 1 else []
        parts += ["pp"] if self.ping_pong else []
        parts += ["ho"] if self.hands_over else []
        parts += ["ends"] if self.shares_ends else []
        parts += ["pull"] if self.pulls else ["ret"] if self.returns else []
        parts += [self.network] if self.network != "none" else []
        parts += ["trace"] if self.trace else []
        return "_".join(parts)

    def _operator(self) -> str:
        """The C++ type that the kernel runs."""
        arguments = f"Tile, mk::{_ELEMENTS[self.dtype]}, {_FLAGS[self.has_bias]}"
        if self.network != "none":
            if self.operator != "all_gather_gemm":
                arguments += f", {_FLAGS[self.network == 'hierarchical']}"
            return f"mk::Network{_OPERATORS[self.operator]}<{arguments}>"
        if self.operator == "all_gather_gemm" and not self.streams:
            arguments += f", {_FLAGS[self.pulls]}, {_FLAGS[self.returns]}"
        if self.operator == "gemm":
            arguments += f", mk::Activation::{_ACTIVATIONS[self.activation]}"
        if self.operator == "gemm_all_reduce" and not self.streams:
            arguments += f", mk::Broadcast::{_BROADCASTS[self.broadcast]}"
        return f"mk::{'Stream' if self.streams else ''}{_OPERATORS[self.operator]}<{arguments}>"

    def _tile(self) -> str:
        """The C++ type of the tile."""
        shape = f"{self.block_m}, {self.block_n}, {self.stages}, {_FLAGS[self.weight_layout == 'kn']}"
        if self.streams:
            tile = f"mk::StreamShape<{shape}, {self.split}, {_FLAGS[self.ping_pong]}, {_FLAGS[self.hands_over]}>"
            return f"mk::EndsShared<{tile}>" if self.shares_ends else tile
        tile = f"mk::TileShape<{shape}, {_FLAGS[self.broadcast == 'staged']}>"
        if self.split > 1:
            tile = f"mk::SharedTileShape<{shape}>"
        return f"mk::ImageTile<{tile}>" if self._moves_images else tile

    def _entry(self) -> tuple[str, str]:
        """The header with the kernel's body, and the function in it."""
        gathers = self.operator == "all_gather_gemm"
        if self.network != "none":
            what, kind = ("gather", "gather_") if gathers else ("operators", "")
            return f"network/{what}", f"run_network_{kind}block"
        if gathers and self.streams:
            return "gather_stream", "run_stream_gather_block"
        call = "run_image_block" if gathers else "run_stream_block" if self.streams else "run_block"
        return f"operators/{self.operator}", call

    def source(self) -> str:
        """The translation unit: one kernel, `mk_kernel`."""
        (header, call), across = self._entry(), self.network != "none"
        parameters = f"const __grid_constant__ mk::{'Network' if across else ''}LaunchArguments args"
        given, assertions = "args", ""
        if self.operator == "all_gather_gemm":
            parameters += ", const __grid_constant__ mk::GatherArguments gather"
            given, assertions = "args, gather", gather_abi.assertions()
        if across:
            assertions += network_abi.assertions()
        return (
            f"namespace mk {{ inline constexpr bool kTrace = {_FLAGS[self.trace]}; }}\n"
            f'#include "device/{header}.cuh"\n'
            f"using Tile = {self._tile()};\n"
            f"static_assert(Tile::kSharedBytes == {self.shared_bytes} && mk::kThreads == {NUM_THREADS});\n"
            f'extern "C" __global__ void __launch_bounds__({NUM_THREADS}, 1)\n'
            f"mk_kernel({parameters}) {{\n  mk::{call}<{self._operator()}>({given});\n}}\n{assertions}"
        )
