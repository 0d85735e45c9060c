"""What a result must be: fp32 truth of the same rounded inputs, and the error that an unfused baseline makes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mkcompile.runtime.kernel_config import KernelConfig

from .ranks import RankInput

_TILE = 128


def weight_kn(given: RankInput, config: KernelConfig) -> torch.Tensor:
    """The weight as [K, N]."""
    return given.w.t() if config.weight_layout == "nk" else given.w


def product(given: RankInput, config: KernelConfig, device: str) -> torch.Tensor:
    """One rank's product in fp32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    full = given.x.to(device).float() @ weight_kn(given, config).to(device).float()
    return full if given.bias is None else full + given.bias.to(device).float()


def baseline_product(given: RankInput, config: KernelConfig, device: str) -> torch.Tensor:
    """One rank's product as cuBLAS rounds it."""
    x, w = given.x.to(device), weight_kn(given, config).to(device)
    return x @ w if given.bias is None else torch.addmm(given.bias.to(device), x, w)


def summed(
    inputs: Sequence[RankInput], config: KernelConfig, device: str, node_ranks: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Truth and baseline of the sum over ranks: the baseline rounds each product, the sum of each node's `node_ranks`
    (0: all are on one), and the sum of those once.
    """
    truth = sum(product(given, config, device) for given in inputs)
    per_node, dtype, rounded = node_ranks or len(inputs), inputs[0].x.dtype, []
    for first in range(0, len(inputs), per_node):
        of_node = sum(baseline_product(one, config, device).float() for one in inputs[first : first + per_node])
        assert isinstance(of_node, torch.Tensor)
        rounded.append(of_node.to(dtype).float())
    baseline = sum(rounded)
    assert isinstance(truth, torch.Tensor) and isinstance(baseline, torch.Tensor)
    return truth, baseline.to(dtype)


def tile_norms(matrix: torch.Tensor) -> torch.Tensor:
    """Norm of each 128 x 128 block."""
    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix.float(), (0, -columns % _TILE, 0, -rows % _TILE))
    blocks = padded.view(padded.shape[0] // _TILE, _TILE, padded.shape[1] // _TILE, _TILE)
    return blocks.square().sum(dim=(1, 3)).sqrt()


def assert_close(out: torch.Tensor, truth: torch.Tensor, baseline: torch.Tensor, what: str = "") -> float:
    """Finite, and in every tile and in all at most twice the baseline's error, more in tiles of few elements, where two
    such norms scatter. Returns the whole error over the baseline's.
    """
    assert out.shape == truth.shape, f"{what}: shape {tuple(out.shape)} for {tuple(truth.shape)}"
    bad = ~torch.isfinite(out)
    assert not bad.any(), f"{what}: {int(bad.sum())} of {out.numel()} not finite, first at {bad.nonzero()[0].tolist()}"
    epsilon = torch.finfo(out.dtype).eps
    error, allowed = tile_norms(out.float() - truth), tile_norms(baseline.float() - truth)
    scatter = 1 + 4 / tile_norms(torch.ones_like(truth)).clamp_min(1.0)
    limit = 2 * scatter * allowed + 0.1 * epsilon * tile_norms(truth) + 1e-6
    wrong = (error > limit).nonzero()
    assert not len(wrong), (
        f"{what}: {len(wrong)} of {error.numel()} tiles wrong, first {wrong[0].tolist()}: error "
        f"{float(error[tuple(wrong[0])]):.3g}, allowed {float(limit[tuple(wrong[0])]):.3g}, relative error "
        f"{float((out.float() - truth).norm() / truth.norm()):.3g}"
    )
    return float(error.norm() / allowed.norm().clamp_min(1e-30))


def assert_bitwise(out: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Equal bits, save that zero has one sign."""
    got, wanted = out + 0.0, expected.to(out.device, out.dtype) + 0.0
    differs = got.view(torch.int16) != wanted.view(torch.int16)
    if differs.any():
        at = tuple(differs.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(differs.sum())} of {out.numel()} elements differ, first at {at}: {out[at]} for {wanted[at]}"
        )
