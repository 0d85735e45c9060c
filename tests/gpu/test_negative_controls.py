"""Kernels with a wait taken out must fail the checks that the real ones pass: else the checks would prove nothing."""

from __future__ import annotations

import pytest
import torch

from mkcompile.runtime import abi, driver, nvrtc, sources
from mkcompile.runtime.gather_launch import GatherSize
from mkcompile.runtime.gather_schedule import push_choice
from mkcompile.runtime.kernel import OPTIONS, LoadedKernel
from mkcompile.runtime.kernel_config import KernelConfig

from .broken_kernels import NO_ARRIVALS, NO_CARRIED, NO_WAIT, without
from .gather_calls import Call
from .ranks import RankGroup, nan_outputs, random_input
from .test_reductions import BOTH, config_of, expected_of
from .truth import summed


def load_broken(config: KernelConfig, device: int, defect: tuple[str, str, str] = NO_WAIT) -> LoadedKernel:
    """The kernel with a defect: by default all waits for peers removed."""
    headers = without(sources.headers(), *defect)
    image = nvrtc.compile_cubin("broken", config.source() + abi.assertions(), headers, OPTIONS).image
    function = driver.load_function(image, "mk_kernel", config.shared_bytes, device)
    return LoadedKernel(config=config, device_idx=device, function=function)


@BOTH
def test_without_waits_a_late_peer_is_noticed(operator: str, broadcast: str) -> None:
    group, config = RankGroup((0, 0)), config_of(operator, broadcast, (128, 128))
    inputs = [random_input(rank, 0, 1024, 1024, 264, config) for rank in range(2)]
    outs = nan_outputs(group, 512 if operator == "gemm_reduce_scatter" else 1024, 1024, config)
    broken = [load_broken(config, 0)] * 2
    launches = group.prepare(config, inputs, outs, kernels=broken)
    group.synchronize()
    group.delay(1, 20_000_000)
    group.run(launches)
    group.streams[0].synchronize()
    truth, _ = summed(inputs, config, "cuda:0")
    wanted = expected_of(config, 0, 2, truth)
    assert not torch.allclose(outs[0].float(), wanted, rtol=0.1, atol=1.0), "the check can't tell a missing partial"
    group.synchronize()


def test_rows_that_are_not_waited_for_are_noticed() -> None:
    group, config = RankGroup((0, 0)), KernelConfig(operator="all_gather_gemm", block_m=128, block_n=128)
    size = GatherSize(segment_rows=1024, k=264, n=(1024,), world=2)
    broken = [load_broken(config, 0, NO_ARRIVALS)] * 2
    call = Call.make(group, push_choice(config, size, group.max_grid(), False), size, kernels=broken)
    group.synchronize()
    group.delay(1, 20_000_000)
    call.run(group)
    group.streams[0].synchronize()
    own, came = call.tensors[0].outs[0].view(2, 1024, 1024)
    assert torch.isfinite(own).all() and not torch.isfinite(came).all(), "the check can't tell missing rows"
    group.synchronize()


def test_images_that_are_told_of_too_early_are_noticed() -> None:
    group, config = RankGroup((0, 0)), KernelConfig(operator="all_gather_gemm", block_m=128, block_n=128)
    size = GatherSize(segment_rows=2048, k=2048, n=(256,), world=2)
    broken = [load_broken(config, 0, NO_CARRIED)] * 2
    call = Call.make(group, push_choice(config, size, group.max_grid(), False), size, kernels=broken)
    group.synchronize()
    call.run(group)
    group.synchronize()
    with pytest.raises(AssertionError):
        call.check(False, "too early")
