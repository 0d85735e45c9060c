"""The model benchmark's one compilation for both modes: captured by Inductor's CUDA graphs, and as it is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.cudagraph_trees import get_manager

from benchmarks.models.contenders import Contender


def _steps(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """The result without gradients, then with them, and all gradients."""
    with torch.no_grad():
        inferred = call(x).clone()
    y = call(x)
    found = torch.autograd.grad(y, [x, *model.parameters()], torch.ones_like(y))
    return [inferred, y.detach().clone(), *(one.clone() for one in found)]


def test_one_compilation_runs_with_cuda_graphs_and_without() -> None:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to("cuda")
    x = torch.randn(32, 64, device="cuda", requires_grad=True)
    entered: list[int] = []
    contender = Contender(
        name="inductor", module=model, graphs=True, cache=None, keeps=False, options={},
        compiled=lambda: entered.append(1),
    )  # fmt: skip
    plain, captured = contender.call(graphs=False), contender.call(graphs=True)
    wanted, skipped = _steps(model, model, x), counters["inductor"]["cudagraph_skips"]
    with contender.compiling():
        without = _steps(model, plain, x)
    assert get_manager(0, create_if_none_exists=False) is None, "nothing is captured while the switch is off"
    compilations = len(entered)
    replays = [_steps(model, captured, x) for _ in range(4)]  # warm-up, capture, replays
    assert get_manager(0, create_if_none_exists=False) is not None
    again = _steps(model, plain, x)
    assert len(entered) == compilations == 2, "one for inference, one for training"
    assert counters["inductor"]["cudagraph_skips"] == skipped
    for found in (without, *replays, again):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
