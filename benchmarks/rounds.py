"""The order of the contenders of a round: another one each time, the same on all ranks.

On a chip that its power limits, whoever runs behind a contender that waits (for the link, for the host) finds a higher
clock: the same launch, timed twice in rounds of one fixed order, differed by up to 9 % (docs/decisions/504).
"""

from __future__ import annotations

import random
from collections.abc import Iterable


def order_of_round(names: Iterable[str], index: int) -> list[str]:
    """The names as round `index` runs them."""
    order = list(names)
    random.Random(index).shuffle(order)
    return order
