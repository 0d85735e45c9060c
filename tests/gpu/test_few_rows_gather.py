"""All-gather + GEMM of few rows by the kernels that stream the weight: virtual ranks on one GPU, and two GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mkcompile.runtime.gather_launch import GatherSize
from mkcompile.runtime.gather_schedule import stream_choice
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.stream_schedule import StreamForm

from .gather_calls import Call, run_back_to_back
from .test_all_gather import WORLDS, config_of, group_of, rows_of

STREAMED = pytest.mark.parametrize(
    "form", [StreamForm((64, 64), 2), StreamForm((64, 32), 1), StreamForm((128, 64), 4), StreamForm((64, 128), 2)],
    ids=lambda form: f"{form.tile[0]}x{form.tile[1]}s{form.split}",
)  # fmt: skip


def run_streamed(
    devices: tuple[int, ...], size: GatherSize, form: StreamForm, *, epochs: int = 4, late: Sequence[int] = (),
    base: KernelConfig | None = None,
) -> None:  # fmt: skip
    """As `run`, by a kernel for few rows."""
    group = group_of(devices)
    choice = stream_choice(base or config_of(), size, group.max_grid(), form)
    calls = [Call.make(group, choice, size, seed=epoch, integers=epoch % 2 == 1) for epoch in range(epochs)]
    run_back_to_back(group, calls, late, f"stream {form}")


@WORLDS
@STREAMED
def test_streamed_few_rows(world: int, form: StreamForm) -> None:
    if world == 8 and form.split > 1:
        pytest.skip(
            "eight launches of clusters that must all be resident timed out on one GPU, probably for want of room"
        )
    for rows in (1, 5, 17, 64):
        run_streamed((0,) * world, rows_of(rows, world, (1032,), 1032), form)


@pytest.mark.parametrize("world", [2, 4])
@STREAMED
def test_several_weights_are_streamed_one_after_the_other(world: int, form: StreamForm) -> None:
    for n, base in (((1032, 128, 40), config_of()), ((8, 264), config_of(has_bias=True, weight_layout="kn"))):
        run_streamed((0,) * world, rows_of(64, world, n, 1032), form, base=base)


@pytest.mark.parametrize("late", [0, 1])
def test_streamed_rows_of_a_late_peer_are_waited_for(late: int) -> None:
    for layout in ("nk", "kn"):
        base = config_of(weight_layout=layout, dtype="float16")
        run_streamed((0, 0), rows_of(100, 2, (264,), 2048), StreamForm((64, 64), 2), late=[late], base=base)


@pytest.mark.gpu2
@STREAMED
@pytest.mark.parametrize("late", [[], [0], [1]], ids=str)
def test_streamed_on_two_gpus(late: list[int], form: StreamForm) -> None:
    for rows, n in ((1, (1032,)), (32, (1032,)), (200, (1032,)), (200, (520, 72, 72))):
        run_streamed((0, 1), rows_of(rows, 2, n, 2048), form, epochs=6, late=late)
