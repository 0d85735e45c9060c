"""The plain GEMM: every tile, layout and dtype; every kind of edge; epilogues; strided operands."""

from __future__ import annotations

import pytest
import torch

from mkcompile.runtime.kernel import LaunchArguments, compile_kernel, launch, load_kernel
from mkcompile.runtime.kernel_config import TILES, KernelConfig
from mkcompile.runtime.tensor_map import Matrix
from mkcompile.runtime.tile_schedule import LaunchSize, TileSchedule, choose_schedule

from .ranks import TORCH_DTYPES, RankInput, random_input
from .truth import assert_bitwise, assert_close, baseline_product, product

ROWS = (1, 2, 16, 17, 63, 64, 65, 127, 128, 129, 255, 1000, 2048, 4097)


def run_gemm(config: KernelConfig, given: RankInput, schedule: TileSchedule | None = None) -> torch.Tensor:
    """One launch into NaN."""
    n = given.w.shape[0 if config.weight_layout == "nk" else 1]
    out = torch.full((given.x.shape[0], n), float("nan"), dtype=TORCH_DTYPES[config.dtype], device="cuda:0")
    size = LaunchSize(m=given.x.shape[0], n=n, k=given.x.shape[1])
    arguments = LaunchArguments(
        terms=((Matrix.of(given.x), Matrix.of(given.w)),),
        out=Matrix.of(out),
        schedule=schedule or choose_schedule(config, size, 128),
        bias=given.bias.data_ptr() if given.bias is not None else 0,
    )
    launch(load_kernel(compile_kernel(config), 0), arguments, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    return out


def check(config: KernelConfig, m: int, n: int, k: int, seed: int = 0) -> None:
    """Close to fp32 on random inputs, exact on integers."""
    given = random_input(0, 0, m, n, k, config, seed)
    what = f"{config.name} {m}x{n}x{k}"
    assert_close(
        run_gemm(config, given), product(given, config, "cuda:0"), baseline_product(given, config, "cuda:0"), what
    )
    exact = random_input(0, 0, m, n, k, config, seed + 1, integers=True)
    assert_bitwise(run_gemm(config, exact), product(exact, config, "cuda:0"), what)


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile[0]}x{tile[1]}")
def test_every_tile_and_layout(tile: tuple[int, int], layout: str) -> None:
    for dtype in ("bfloat16", "float16"):
        config = KernelConfig(block_m=tile[0], block_n=tile[1], weight_layout=layout, dtype=dtype)  # type: ignore[arg-type]
        for m, n, k in ((300, 520, 200), (64, 256, 64), (1, 8, 8), (777, 1032, 1000)):
            check(config, m, n, k)


@pytest.mark.parametrize("m", ROWS)
def test_any_number_of_rows(m: int) -> None:
    for tile in ((64, 64), (128, 256)):
        check(KernelConfig(block_m=tile[0], block_n=tile[1]), m, 1032, 520)


def test_two_runs_give_the_same_bits() -> None:
    config = KernelConfig()
    given = random_input(0, 0, 1024, 2048, 1024, config)
    assert torch.equal(run_gemm(config, given), run_gemm(config, given))


@pytest.mark.parametrize("grid", [1, 3, 100, 132])
def test_any_grid_and_raster(grid: int) -> None:
    config = KernelConfig(block_m=128, block_n=128)
    given = random_input(0, 0, 1000, 1000, 264, config)
    truth = product(given, config, "cuda:0")
    for group in (1, 3, 8):
        out = run_gemm(config, given, TileSchedule(grid=grid, raster_group=group))
        assert_close(out, truth, baseline_product(given, config, "cuda:0"), f"grid {grid} group {group}")


@pytest.mark.parametrize("activation", ["none", "relu", "gelu_tanh", "gelu_erf", "silu"])
def test_bias_and_activation(activation: str) -> None:
    functions = {
        "none": lambda x: x, "relu": torch.relu, "silu": torch.nn.functional.silu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"), "gelu_erf": torch.nn.functional.gelu,
    }  # fmt: skip
    for dtype in ("bfloat16", "float16"):
        config = KernelConfig(has_bias=True, activation=activation, dtype=dtype)  # type: ignore[arg-type]
        given = random_input(0, 0, 300, 520, 16, config)
        truth = functions[activation](product(given, config, "cuda:0"))
        baseline = functions[activation](baseline_product(given, config, "cuda:0"))
        assert_close(run_gemm(config, given), truth, baseline, config.name)


@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_sliced_operands_are_read_in_place(layout: str) -> None:
    config = KernelConfig(block_m=128, block_n=128, weight_layout=layout)  # type: ignore[arg-type]
    whole = random_input(0, 0, 512, 1024, 768, config)
    given = RankInput(x=whole.x[16:400, 64:576], w=whole.w[64:576, 64:576])
    assert_close(run_gemm(config, given), product(given, config, "cuda:0"), baseline_product(given, config, "cuda:0"))


def test_sum_of_products() -> None:
    config = KernelConfig()
    first, second = (random_input(rank, 0, 300, 520, k, config) for rank, k in enumerate((136, 264)))
    out = torch.full((300, 520), float("nan"), dtype=torch.bfloat16, device="cuda:0")
    terms = tuple((Matrix.of(given.x), Matrix.of(given.w)) for given in (first, second))
    arguments = LaunchArguments(terms=terms, out=Matrix.of(out), schedule=TileSchedule(grid=6))
    launch(load_kernel(compile_kernel(config), 0), arguments, torch.cuda.current_stream().cuda_stream)
    truth = product(first, config, "cuda:0") + product(second, config, "cuda:0")
    both = torch.cat((first.x, second.x), 1) @ torch.cat((first.w, second.w), 1).t()
    assert_close(out, truth, both)
