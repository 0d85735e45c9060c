"""All-gather + GEMM whose blocks fetch the peers' rows: virtual ranks on one GPU, and two GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mkcompile.runtime.gather_launch import GatherSize
from mkcompile.runtime.gather_schedule import pull_choice
from mkcompile.runtime.kernel_config import KernelConfig

from .gather_calls import Call, run_back_to_back
from .marks import ONE_AND_TWO_GPUS
from .test_all_gather import ROWS, WORLDS, choice_of, config_of, group_of, rows_of


def run_pulled(
    devices: tuple[int, ...], config: KernelConfig, size: GatherSize, *, epochs: int = 4, late: Sequence[int] = ()
) -> None:
    """Back-to-back launches with different inputs, then all checked."""
    group = group_of(devices)
    choice = pull_choice(config, size, group.max_grid())
    calls = [Call.make(group, choice, size, seed=epoch, integers=epoch % 2 == 1) for epoch in range(epochs)]
    run_back_to_back(group, calls, late, "pull")


def test_any_number_of_rows_is_fetched() -> None:
    for rows in ROWS:
        run_pulled((0, 0), config_of((128, 128)), rows_of(rows, 2, (520,), 264), epochs=2)


@WORLDS
@pytest.mark.parametrize("rows", [1, 130, 700])
def test_rows_are_fetched(world: int, rows: int) -> None:
    for tile in ((128, 160), (64, 256)):
        run_pulled((0,) * world, config_of(tile), rows_of(rows, world, (776,)))


def test_segments_columns_and_several_weights_are_fetched() -> None:
    run_pulled((0, 0), config_of((128, 128), has_bias=True), rows_of(200, 2, (520, 8, 264), segments=3))
    size = GatherSize(segment_rows=300, k=192, n=(264, 520), world=3, columns=True)
    run_pulled((0, 0, 0), config_of((128, 128), weight_layout="kn"), size)


@pytest.mark.parametrize("late", [0, 1])
def test_rows_of_a_late_peer_are_waited_for(late: int) -> None:
    run_pulled((0, 0), config_of(), rows_of(1536, 2), late=[late], epochs=5)


@ONE_AND_TWO_GPUS
@pytest.mark.parametrize("late", [[], [0], [1]], ids=str)
def test_rows_are_fetched_by_two_ranks(late: list[int], devices: tuple[int, ...]) -> None:
    run_pulled(devices, config_of((128, 160)), rows_of(2048, 2, (2048,), 1024), epochs=6, late=late)
    run_pulled(devices, config_of((128, 128)), rows_of(999, 2, (1032,), 328), epochs=6, late=late)


@ONE_AND_TWO_GPUS
def test_a_peer_that_pushes_in_its_next_launch_raises_no_flag_of_fetched_rows(devices: tuple[int, ...]) -> None:
    group, size, config = group_of(devices), rows_of(1920, 2, (520,), 4096), config_of((128, 128))
    choices = [pull_choice(config, size, group.max_grid()), choice_of(group, config, size, "push", False)] * 3
    calls = [Call.make(group, choice, size, seed=i, integers=i % 2 == 1) for i, choice in enumerate(choices)]
    run_back_to_back(group, calls, [1], "pull and push")
