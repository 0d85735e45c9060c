"""All-gather calls of two processes, by every variant: against fp32, in graphs, beside reductions, under torch.compile.

Shapes: M gathered rows, N columns, K summed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mkcompile.errors import WorkspaceError
from mkcompile.ops.registry import Call
from mkcompile.runtime.gather_form import GatherForm
from mkcompile.runtime.gather_operation import GatherOperation
from mkcompile.runtime.gather_schedule import (
    GatherChoice,
    Variant,
    choose_gather,
    pull_choice,
    push_choice,
    read_choice,
    stream_choice,
    stream_choices,
)
from mkcompile.runtime.stream_schedule import StreamForm
from mkcompile.runtime.tactics import Tactics
from tests.gpu.compiled_cases import Problem, compare
from tests.gpu.pair import Pair, Product, backend_of_kernels
from tests.gpu.truth import assert_close

ROWS = (1, 2, 16, 17, 63, 64, 65, 127, 128, 129, 255, 1000, 2048, 4097, 8192)
VARIANTS: tuple[Variant, ...] = ("push", "remote_read", "copy_engine", "library", "pull", "stream")
REPLAYS = 100
LAUNCHES = 10_000
# Where ranks share a GPU each launch takes some of the driver's turns.
LAUNCHES_BY_TURNS = 500
#: For captures without warm-up, by variant: a tile that, in float16 and this layout, no other case takes, or any (the
#: copy engine's need more room than there is); and rows.
_FIRST_SEEN: dict[Variant, tuple[tuple[int, int] | None, int]] = {
    "push": ((64, 256), 1200), "remote_read": ((64, 128), 1200), "pull": ((64, 256), 1200), "stream": ((64, 64), 100),
    "copy_engine": (None, 12_000), "library": (None, 20_000),
}  # fmt: skip


@dataclass(slots=True)
class OneVariant:
    """The planner, but gathers go by one variant."""

    other: Tactics
    variant: Variant

    def __call__(self, call: Call, form: Any, max_grid: int) -> Any:
        return self.other(call, form, max_grid)

    def gather(self, call: Call, form: GatherForm, max_grid: int) -> GatherChoice:
        variant = self.variant
        if variant == "library" and (form.returned or form.size.columns or form.size.segments > 1):
            variant = "copy_engine"
        streamed = list(stream_choices(form.config, form.size, max_grid, form.returned))
        if variant in ("pull", "stream") and (form.returned or (variant == "stream" and not streamed)):
            variant = "push"
        if variant == "remote_read":  # also where columns are many
            if form.returned:
                return choose_gather(form.config, form.size, max_grid, True, "push")
            return read_choice(form.config, form.size, max_grid)
        return choose_gather(form.config, form.size, max_grid, form.returned, variant)


@dataclass(slots=True)
class OneKernel:
    """The planner, but gathers go by one variant, of the blocks', and by one tile of it."""

    other: Tactics
    variant: Variant
    tile: tuple[int, int]

    def __call__(self, call: Call, form: Any, max_grid: int) -> Any:
        return self.other(call, form, max_grid)

    def gather(self, call: Call, form: GatherForm, max_grid: int) -> GatherChoice:
        config = form.config.with_tile(*self.tile)
        if self.variant == "stream":
            return stream_choice(config, form.size, max_grid, StreamForm(self.tile, 1))
        if self.variant == "push":
            return push_choice(config, form.size, max_grid, form.returned)
        return (pull_choice if self.variant == "pull" else read_choice)(config, form.size, max_grid)


@contextmanager
def only(pair: Pair, variant: Variant, tile: tuple[int, int] | None = None) -> Iterator[None]:
    """Within it, new calls go by the variant, and by a tile of it; nothing that was decided before holds."""
    launcher = pair.launcher
    planner = launcher._tactics
    launcher._operations.clear()
    launcher._tactics = OneKernel(planner, variant, tile) if tile else OneVariant(planner, variant)
    try:
        yield
    finally:
        launcher._operations.clear()
        launcher._tactics = planner


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """One call: the shard is `shape`, gathered along `dim`; a product for each of `n`, with a bias for every other."""

    shape: tuple[int, ...]
    dim: int = 0
    n: tuple[int, ...] = (520,)
    layout: str = "nk"
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    returned: bool = False
    integers: bool = False
    seed: int = 0

    def draw(self, pair: Pair, *shape: int, at: int, rank: int) -> Tensor:
        """Numbers of one rank."""
        make = pair.integers if self.integers else pair.draw
        return make(*shape, seed=20 * self.seed + at, rank=rank, dtype=self.dtype)

    def shard(self, pair: Pair, rank: int) -> Tensor:
        return self.draw(pair, *self.shape, at=0, rank=rank)

    def operands(self, pair: Pair) -> tuple[list[Tensor], list[Tensor | None]]:
        """Weights [K, N] and biases of this rank."""
        inner = self.shape[-1] * (pair.world_size if self.dim == len(self.shape) - 1 else 1)
        weights, biases = [], []
        for i, n in enumerate(self.n):
            stored = (n, inner) if self.layout == "nk" else (inner, n)
            weight = self.draw(pair, *stored, at=1 + 2 * i, rank=pair.rank)
            weights.append(weight.t() if self.layout == "nk" else weight)
            with_bias = self.bias and i % 2 == 0
            biases.append(self.draw(pair, n, at=2 + 2 * i, rank=pair.rank) if with_bias else None)
        return weights, biases

    def call(
        self, pair: Pair, shard: Tensor, w: Sequence[Tensor], bias: Sequence[Tensor | None], group: str | None = None
    ) -> list[Tensor]:
        """The operator."""
        forms = [0] * len(self.n)
        outs: list[Tensor] = torch.ops.mkcompile.all_gather_gemm(
            shard, w, bias, forms, self.dim, self.returned, pair.world_size, group or pair.group, ""
        )
        return outs

    def check(
        self, pair: Pair, outs: Sequence[Tensor], w: Sequence[Tensor], bias: Sequence[Tensor | None], what: str
    ) -> float:
        """Close per tile, exact for integers; the gathered tensor bitwise."""
        gathered = torch.cat([self.shard(pair, rank) for rank in range(pair.world_size)], self.dim)
        whole, worst = gathered.reshape(-1, gathered.shape[-1]), 0.0
        for i in range(len(self.n)):
            one = bias[i]
            truth = whole.float() @ w[i].float() + (0.0 if one is None else one.float())
            if self.integers:
                assert torch.equal(outs[i].float(), truth), f"{what}, product {i} of {self}"
                continue
            baseline = whole @ w[i] if one is None else torch.addmm(one, whole, w[i])
            worst = max(worst, assert_close(outs[i], truth, baseline, f"{what}, product {i} of {self}"))
        if self.returned:
            assert torch.equal(outs[-1], gathered), f"{what}: gathered tensor of {self}"
        return worst


def run(pair: Pair, calls: Sequence[Gather], what: str) -> float:
    """Each twice, with equal bits; the worst error over the baseline's."""
    worst = 0.0
    for number, one in enumerate(calls):
        shard, (w, bias) = one.shard(pair, pair.rank), one.operands(pair)
        first = one.call(pair, shard, w, bias)
        if number % 8 == 0:
            pair.poison()
        again = one.call(pair, shard, w, bias)
        worst = max(worst, one.check(pair, again, w, bias, what))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), f"{what}: other bits, {one}"
    pair.expect_launches("all_gather_gemm", at_least=2)
    return round(worst, 3)


def any_number_of_rows(pair: Pair) -> dict[str, Any]:
    """From one row to thousands, by every variant."""
    rows = ROWS if pair.on_gpu else ROWS[:4]
    worst = {}
    for variant in VARIANTS:
        with only(pair, variant):
            calls = [
                Gather(shape=(m, 264), integers=i % 2 == 1, returned=i % 3 == 0, seed=i) for i, m in enumerate(rows)
            ]
            worst[variant] = run(pair, calls, variant)
    return {"worst_error_over_baseline": worst}


def forms_of_calls(pair: Pair) -> dict[str, Any]:
    """Several weights with and without bias, layouts, dtypes, segments, columns, strided and misaligned shards."""
    calls = [
        Gather(shape=(384, 328), n=(776, 8, 264), layout=layout, dtype=dtype, bias=bias, returned=bias, seed=3)
        for layout in ("nk", "kn")
        for dtype in (torch.bfloat16, torch.float16)
        for bias in (False, True)
    ]
    calls += [
        Gather(shape=(64, 1032), n=(520, 72, 40), layout=layout, bias=layout == "kn", seed=7) for layout in ("nk", "kn")
    ]
    calls += [Gather(shape=(3, 200, 136), dim=1, n=(264, 72), returned=returned, seed=4) for returned in (False, True)]
    calls += [Gather(shape=(2, 150, 192), dim=2, n=(264,), returned=returned, seed=5) for returned in (False, True)]
    worst = {}
    for variant in VARIANTS:
        with only(pair, variant):
            worst[variant] = run(pair, calls, variant)
            one = Gather(shape=(192, 136), integers=True, seed=6)
            w, bias = one.operands(pair)
            wide = torch.cat([one.shard(pair, pair.rank)] * 2, 1)[:, :136]
            shifted = torch.empty(192 * 136 + 4, dtype=wide.dtype, device=wide.device)[4:].view(192, 136).copy_(wide)
            for shard in (wide, shifted if pair.rank == 1 else wide):
                one.check(pair, one.call(pair, shard, w, bias), w, bias, f"{variant}, shard that is copied")
    return {"worst_error_over_baseline": worst}


def model_sizes(pair: Pair) -> dict[str, Any]:
    """The shapes that are benchmarked, by every variant and as planned."""
    sizes = ((1024, 1280, 8192), (4096, 1280, 8192), (1024, 7168, 8192), (2048, 4096, 16384))
    calls = [Gather(shape=(m, k), n=(n,), seed=i) for i, (m, n, k) in enumerate(sizes)]
    worst = {"planned": run(pair, calls, "planned")}
    for variant in VARIANTS:
        with only(pair, variant):
            worst[variant] = run(pair, calls, variant)
    return {"worst_error_over_baseline": worst}


def beside_reductions(pair: Pair) -> dict[str, Any]:
    """All operators and variants in turn on one workspace, hosts apart by turns, nothing synchronised between."""
    results: list[tuple[Any, ...]] = []
    for turn in range(6):
        for variant in VARIANTS:
            with only(pair, variant):
                one = Gather(shape=(300 + 100 * turn, 264), integers=True, seed=turn)
                shard, (w, bias) = one.shard(pair, pair.rank), one.operands(pair)
                if pair.on_gpu and turn % 2 == pair.rank:
                    torch.cuda._sleep(3_000_000)
                results.append((one, one.call(pair, shard, w, bias), w, bias))
        for operator in ("gemm_all_reduce", "gemm_reduce_scatter"):
            product = Product(operator=operator, rows=256, n=264, k=136, integers=True, seed=turn)
            results.append((product, product.call(pair, *product.inputs(pair, pair.rank))))
    for entry in results:
        if isinstance(entry[0], Gather):
            entry[0].check(pair, *entry[1:], "in turn")
        else:
            entry[0].check(pair, entry[1])
    return {"calls": len(results)}


def replayed(pair: Pair) -> dict[str, Any]:
    """Every variant in one graph, replayed with other inputs, eager calls in between."""
    one = Gather(shape=(300, 264), integers=True, seed=1)
    graphs, stills, outs = {}, {}, {}
    for variant in VARIANTS:
        with only(pair, variant):
            still = (one.shard(pair, pair.rank).clone(), *one.operands(pair))
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                one.call(pair, *still)
            torch.cuda.current_stream().wait_stream(stream)
            pair.meet()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outs[variant] = one.call(pair, *still)
            graphs[variant], stills[variant] = graph, still
    pair.meet()
    for replay in range(REPLAYS):
        fresh = Gather(shape=(300, 264), integers=True, seed=replay + 2)
        w, bias = fresh.operands(pair)
        for variant in VARIANTS:
            stills[variant][0].copy_(fresh.shard(pair, pair.rank))
            stills[variant][1][0].copy_(w[0])
            graphs[variant].replay()
        for variant in VARIANTS:
            fresh.check(pair, outs[variant], w, bias, f"replay {replay} of {variant}")
        if replay % 10 == 0:
            again = fresh.call(pair, fresh.shard(pair, pair.rank), w, bias)
            fresh.check(pair, again, w, bias, f"eager after replay {replay}")
    return {"replays": REPLAYS}


def capture_without_warm_up(pair: Pair) -> dict[str, Any]:
    """A typed error that says what to do, by every variant; afterwards the same call works.

    By kernels that no other case loads; where there is none, with more rows than any other case.
    """
    texts: dict[str, Any] = {}
    for variant, (tile, rows) in _FIRST_SEEN.items():
        with only(pair, variant, tile):
            one = Gather(shape=(rows, 4096), integers=True, n=(64,), seed=3, layout="kn", dtype=torch.float16)
            operands = (one.shard(pair, pair.rank), *one.operands(pair))
            try:
                with torch.cuda.graph(torch.cuda.CUDAGraph()):
                    one.call(pair, *operands)
            except WorkspaceError as error:
                texts[variant] = str(error)
            pair.meet()
            one.check(pair, one.call(pair, *operands), *operands[1:], variant)
    silent = [variant for variant in _FIRST_SEEN if "warm up first" not in texts.get(variant, "")]
    assert not silent, f"no error from {silent}: {texts}"
    return texts


def sequence_parallel(pair: Pair) -> dict[str, Any]:
    """A compiled block: all-gather before the up projection, reduce-scatter after the down projection, backward too."""
    scale = 1 if pair.on_gpu else 16
    ratios = {}
    for variant in VARIANTS:
        with only(pair, variant):
            torch._dynamo.reset()
            problem = Problem(batch=2, length=1024 // scale, width=2048 // scale, hidden=8192 // scale, sequence=True)
            compiled = lambda model: torch.compile(model, backend=backend_of_kernels, fullgraph=True)  # noqa: E731
            before = pair.launcher.launched["all_gather_gemm"]
            ratios[variant] = compare(problem, pair, compiled)
            if pair.on_gpu:
                assert pair.launcher.launched["all_gather_gemm"] > before, dict(pair.launcher.launched)
    return {"ratios": ratios, "launched": dict(pair.launcher.launched)}


def prepared(
    pair: Pair, one: Gather, variant: Variant, group: str | None = None
) -> tuple[Callable[[], list[Tensor]], Tensor]:
    """A call by the variant that has been made once and was right; again it is only launched. And its first product."""
    with only(pair, variant):
        operands = (one.shard(pair, pair.rank), *one.operands(pair))
        outs = one.call(pair, *operands, group=group)
        one.check(pair, outs, *operands[1:], variant)
        (operation,) = pair.launcher._operations.values()
    assert isinstance(operation, GatherOperation), variant
    return partial(operation.run, *operands), outs[0].clone()


def back_to_back(pair: Pair) -> dict[str, Any]:
    """Thousands of launches with no host sync, each rank held up at random; every bit of every result is compared on
    the device. For the copy engine it is the litmus: a flag that overtook its rows would show.
    """
    ready = [
        prepared(pair, Gather(shape=(rows, 264), integers=True, seed=seed), variant)
        for variant in VARIANTS
        for seed, rows in enumerate((96, 700))
    ]
    pair.meet()
    wrong = torch.zeros((), dtype=torch.int64, device=pair.device)
    skew = random.Random(pair.rank + 1)
    launches = LAUNCHES_BY_TURNS if pair.shares_device else LAUNCHES
    started = time.monotonic()
    for i in range(launches):
        run_again, expected = ready[i * 7 % len(ready)]
        if skew.random() < 0.02:
            torch.cuda._sleep(int(skew.random() * 500_000))
        wrong += (run_again()[0] != expected).sum()
    torch.cuda.synchronize()
    seconds = time.monotonic() - started
    pair.launcher.check()
    pair.meet()
    assert int(wrong) == 0, f"{int(wrong)} elements differ"
    return {"launches": launches, "seconds": round(seconds, 2)}


CASES = {
    "rows": any_number_of_rows,
    "forms": forms_of_calls,
    "beside": beside_reductions,
    "back_to_back": back_to_back,
    "replayed": replayed,
    "capture_without_warm_up": capture_without_warm_up,
    "sequence_parallel": sequence_parallel,
    "sizes": model_sizes,
}
