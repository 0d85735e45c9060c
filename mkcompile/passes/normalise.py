"""Makes equal things look equal, before the finders look. Each step is right without any fusion; a loss is undone."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from mkcompile.passes.graph import erase_dead
from mkcompile.passes.normalise_duplicates import fold_nested_waits, merge_duplicates, return_waited
from mkcompile.passes.normalise_gemms import single_batches_to_mm, unit_permutes_to_views, unscale_addends
from mkcompile.passes.normalise_rows import mm_to_rows, rows_to_mm
from mkcompile.passes.normalise_sizes import sizes_from_inputs
from mkcompile.passes.normalise_sums import fold_sums

# In order. Dead readers go first and last: they look as if a value were needed elsewhere. What is shared shows only
# after merging, and sums fold only where their parts have one form.
STEPS: tuple[Callable[[fx.Graph], None], ...] = (
    erase_dead,
    sizes_from_inputs,
    fold_nested_waits,
    return_waited,
    merge_duplicates,
    unit_permutes_to_views,
    single_batches_to_mm,
    rows_to_mm,
    fold_sums,
    unscale_addends,
    erase_dead,
)


def run(graph: fx.Graph) -> None:
    """Normalise the graph in place."""
    for step in STEPS:
        step(graph)


def undo(graph: fx.Graph) -> None:
    """Take back what was a loss where nothing was fused."""
    mm_to_rows(graph)
