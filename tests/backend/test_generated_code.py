"""The code that Inductor generates for fused operators: calls below torch's dispatcher, where that is safe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.utils import get_code, run_and_get_code
from torch.distributed._functional_collectives import all_reduce
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from mkcompile.ops import registry
from mkcompile.ops.registry import Call, Shortcut, ShortcutLauncher, Site, set_launcher
from tests.backend.calls import ALWAYS

pytestmark = pytest.mark.usefixtures("fake_world")


def two_products(x: Tensor, w: Tensor) -> Tensor:
    hidden = all_reduce(x @ w, "sum", [0, 1])
    reduced: Tensor = all_reduce(hidden @ w, "sum", [0, 1])
    return reduced.clone()


def residual(x: Tensor, w: Tensor) -> Tensor:
    """The sum may be written over the reduced product, and that one's memory be used again."""
    reduced: Tensor = all_reduce(x @ w, "sum", [0, 1])
    return (reduced + x) @ w


def by_hand(x: Tensor, w: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkcompile.gemm_all_reduce([x], [w], None, "sum", 2, "0", "")
    return out


def compiled(function: Callable[..., Tensor], **options: Any) -> tuple[Callable[..., Tensor], str]:
    """The function and its generated code."""
    x, w = torch.randn(16, 16), torch.randn(16, 16)
    with inductor_config.patch(force_disable_caches=True):
        call = torch.compile(function, backend="mkernel", options=ALWAYS, **options)
        with torch.no_grad():
            _, code = run_and_get_code(call, x, w)
    return call, "\n".join(code)


class Fixed(ShortcutLauncher):
    """Counts who asks, and answers short calls with ones; `stale` makes it take none."""

    def __init__(self) -> None:
        self.long = self.short = self.asked = 0
        self.stale = False

    def __call__(self, call: Call) -> Any:
        self.long += 1
        return torch.zeros(16, 16)

    def shortcut(self, call_type: type[Call]) -> Shortcut | None:
        return None

    def shortcut_like(self, call: Call) -> Shortcut | None:
        self.asked += 1
        return self._again

    def _again(self, *arguments: Any) -> Tensor | None:
        self.short += not self.stale
        return None if self.stale else torch.ones(16, 16)


@pytest.fixture
def launcher() -> Any:
    before, fixed = registry._REGISTRY.launcher, Fixed()
    set_launcher(fixed)
    yield fixed
    set_launcher(before)


def test_calls_of_the_pass_go_below_the_dispatcher() -> None:
    _, code = compiled(two_products)
    assert code.count("= MkcompileSite('gemm_all_reduce', fixed=True)") == 2
    assert "torch.ops.mkcompile.gemm_all_reduce.default(" not in code


def test_memory_of_a_planned_result_is_freed_and_given_to_nobody() -> None:
    def code(results: str) -> str:
        torch._dynamo.reset()
        with inductor_config.patch(force_disable_caches=True), torch.no_grad():
            call = torch.compile(residual, backend="mkernel", options={**ALWAYS, "mkernel.results": results})
            return "\n".join(get_code(call, torch.randn(16, 16), torch.randn(16, 16)))  # nothing of it is built

    planned = code("planned")
    assert "symm_mem buffer free" in planned and "# reuse" not in planned
    elsewhere = code("ordinary")
    assert "symm_mem buffer free" not in elsewhere and "# reuse" in elsewhere, "what Inductor does with others"


def test_sizes_that_are_not_known_are_looked_up_at_each_call() -> None:
    assert "fixed=False)" in compiled(two_products, dynamic=True)[1]


def test_calls_by_hand_keep_the_ordinary_form() -> None:
    """Such a graph's cache key may not hold our version."""
    code = compiled(by_hand)[1]
    assert "MkcompileSite" not in code and "torch.ops.mkcompile.gemm_all_reduce.default(" in code


def test_profilers_and_modes_see_the_operator() -> None:
    call, _ = compiled(two_products)
    x, w = torch.randn(16, 16), torch.randn(16, 16)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as seen:
        call(x, w)
    assert [one.count for one in seen.key_averages() if one.key == "mkcompile::gemm_all_reduce"] == [2]
    with torch.no_grad(), FlopCounterMode(display=False) as flops:
        call(x, w)
    assert flops.get_total_flops() == 2 * 2 * 16**3


def test_a_site_asks_for_the_short_way_once(launcher: Fixed) -> None:
    call, _ = compiled(two_products)  # in its first run torch's dispatch mode looks at what custom operators do
    with torch.no_grad():
        call(torch.randn(16, 16), torch.randn(16, 16))
        long = launcher.long
        outs = [call(torch.randn(16, 16), torch.randn(16, 16)) for _ in range(2)]
    assert (launcher.long, launcher.asked, launcher.short) == (long, 2, 4)
    assert all(torch.equal(out, torch.ones(16, 16)) for out in outs)


def test_a_site_asks_again_when_the_short_way_has_ended(launcher: Fixed) -> None:
    site, operands = Site("gemm_all_reduce", fixed=True), ([torch.randn(16, 16)], [torch.randn(16, 16)])
    for stale, expected in ((False, (1, 1, 0)), (False, (1, 1, 1)), (True, (2, 2, 1)), (False, (2, 2, 2))):
        launcher.stale = stale
        site(*operands, None, "sum", 2, "0", "key")
        assert (launcher.long, launcher.asked, launcher.short) == expected
    other = Fixed()
    set_launcher(other)
    site(*operands, None, "sum", 2, "0", "key")
    assert (other.long, other.asked, launcher.short) == (1, 1, 2), "another launcher is asked anew"
