"""Calls that have been made once, so that all kernels are loaded and nothing is left to decide; then only launched.

All numbers are exact, so that one glance tells right from wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from tests.gpu.gather_cases import VARIANTS, Gather, prepared
from tests.gpu.pair import KERNELS, Pair, Product

#: A wide and a narrow launch of each reduction.
PRODUCTS = tuple(
    product
    for operator in KERNELS
    for product in (
        Product(operator=operator, rows=1024, n=2048, k=512, integers=True, seed=1),
        Product(operator=operator, rows=96, n=264, k=72, integers=True, seed=2),
    )
)
#: The same of gathers.
GATHERS = (
    Gather(shape=(512, 512), n=(2048,), integers=True, seed=1),
    Gather(shape=(96, 72), n=(264,), integers=True, seed=2),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """One call: again, and what it gives."""

    name: str
    run: Callable[[], Tensor]
    truth: Tensor


def ready_products(pair: Pair, products: Sequence[Product] = PRODUCTS, group: str | None = None) -> list[Ready]:
    """Reductions, by the way that users' calls go."""
    ready = []
    for product in products:
        operands, expected = product.inputs(pair, pair.rank), product.expected(pair)
        product.check(pair, product.call(pair, *operands, group=group), expected)
        again = partial(product.call, pair, *operands, group=group)
        ready.append(Ready(name=product.name, run=again, truth=expected[0]))
    pair.meet()
    return ready


def ready_gathers(pair: Pair, gathers: Sequence[Gather] = GATHERS, group: str | None = None) -> list[Ready]:
    """Gathers by every variant."""
    ready = []
    for variant in VARIANTS:
        for one in gathers:
            again, truth = prepared(pair, one, variant, group)
            ready.append(Ready(name=f"{variant} of {one}", run=partial(_first, again), truth=truth))
    pair.meet()
    return ready


def _first(run: Callable[[], list[Tensor]]) -> Tensor:
    return run()[0]


def check_all(outs: Sequence[tuple[Ready, Tensor]]) -> int:
    """How many there were. Raises: AssertionError for one that is wrong."""
    for one, out in outs:
        wrong = int((out.float() != one.truth).sum())
        assert wrong == 0, f"{one.name}: {wrong} elements differ"
    return len(outs)
