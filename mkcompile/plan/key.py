"""`plan_key`, the text by which a compiled graph's call names its plan: the policy it was compiled under, what is known
of the call's place in the graph, the problem.

Calls by hand carry none: who calls an operator wants it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from mkcompile.config import FusePolicy
from mkcompile.ops.problem import Problem

_SEPARATOR = ";"
_AND = "+"
#: Facts: no other collective of the graph can run beside the call; its result is dead when the graph ends.
ALONE, STAYS = "alone", "stays"
BY_HAND: FusePolicy = "always"


def make(fuse: FusePolicy, problem: Problem) -> str:
    """The key of a site that was fused under this policy; equal on all ranks."""
    return f"{fuse}{_SEPARATOR}{problem.key()}"


def fuse_of(plan_key: str) -> FusePolicy:
    """The policy of the graph that the call is in."""
    head, separator, _ = plan_key.partition(_SEPARATOR)
    head = head.partition(_AND)[0]
    return head if separator and head in get_args(FusePolicy) else BY_HAND  # type: ignore[return-value]


def with_facts(plan_key: str, facts: Iterable[str]) -> str:
    """The key with what is known of the call, in place of what was known before."""
    head, _, problem = plan_key.partition(_SEPARATOR)
    return f"{_AND.join([head.partition(_AND)[0], *facts])}{_SEPARATOR}{problem}"


def facts_of(plan_key: str) -> frozenset[str]:
    """What the key says of the call's place; nothing for calls by hand."""
    head, separator, _ = plan_key.partition(_SEPARATOR)
    return frozenset(head.split(_AND)[1:]) if separator else frozenset()
