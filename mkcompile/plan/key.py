"""`plan_key`, the text by which a compiled graph's call names its plan: the policy it was compiled under, the problem.

Calls by hand carry none: who calls an operator wants it.
"""

from __future__ import annotations

from typing import get_args

from mkcompile.config import FusePolicy
from mkcompile.ops.problem import Problem

_SEPARATOR = ";"
BY_HAND: FusePolicy = "always"


def make(fuse: FusePolicy, problem: Problem) -> str:
    """The key of a site that was fused under this policy; equal on all ranks."""
    return f"{fuse}{_SEPARATOR}{problem.key()}"


def fuse_of(plan_key: str) -> FusePolicy:
    """The policy of the graph that the call is in."""
    head, separator, _ = plan_key.partition(_SEPARATOR)
    return head if separator and head in get_args(FusePolicy) else BY_HAND  # type: ignore[return-value]
