"""Every refusal of the planner has a reason of its own, and every reason says what the user can do."""

from __future__ import annotations

import re

import pytest

from mkcompile.passes.judge import reason_for
from mkcompile.passes.reason import Reason
from mkcompile.plan.plan import Refusal

# The part behind the last semicolon is what to do: it starts with a verb in the imperative, or says that there is
# nothing to do, or names the command that tells.
_ADVICE = re.compile(
    r"^(nothing to do|use|set|make|give|apply|add|scale|reduce|scatter|gather|reshape|keep|wait|remove|compile|compute|"
    r"drop|shard|batch|pad|`python -m mkcompile doctor`)\b"
)


@pytest.mark.parametrize("reason", Reason, ids=lambda one: one.name)
def test_the_sentence_ends_with_what_to_do(reason: Reason) -> None:
    assert ";" in reason.value
    advice = reason.value.rpartition("; ")[2]
    assert _ADVICE.match(advice) or advice.startswith("`python -m mkcompile doctor`"), advice
    assert not reason.value.endswith(".") and len(reason.value) < 250


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        (Refusal.NO_GAIN, Reason.NO_GAIN),
        (Refusal.NO_P2P, Reason.NO_P2P),
        (Refusal.NO_NETWORK_KERNEL, Reason.NO_NETWORK_KERNEL),
        (Refusal.UNEVEN_NODES, Reason.UNEVEN_NODES),
        (Refusal.TOO_MANY_RANKS, Reason.TOO_MANY_RANKS),
        (Refusal.WEIGHT_PRODUCT, Reason.WEIGHT_PRODUCT),
        (Refusal.TINY_PAYLOAD, Reason.TINY_PAYLOAD),
        (Refusal.DTYPE, Reason.DTYPE),
        (Refusal.LAYOUT, Reason.LAYOUT),
        (Refusal.SHAPE, Reason.SHAPE),
        (Refusal.ONE_RANK, Reason.WORLD_SIZE_ONE),
        (Refusal.NO_KERNEL, Reason.NO_KERNEL),
    ],
)
def test_the_planner_speaks_in_the_passes_words(refusal: Refusal, reason: Reason) -> None:
    assert reason_for(refusal) is reason


def test_no_refusal_of_the_planner_is_left_out() -> None:
    assert {reason_for(refusal) for refusal in Refusal} <= set(Reason)
