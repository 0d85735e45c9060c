"""What every rank would do first, done once in the server that ranks are forked from: imports, and one compile.

Inductor gathers its patterns, decompositions and lowerings at its first compile, which takes a rank longer than a small
model does. Nothing wants gradients: autograd's threads would not survive a fork.
"""

from __future__ import annotations

import torch

import mkcompile.backend  # noqa: F401


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """No C++ to compile."""
    return x @ w


torch.set_num_threads(1)
with torch.no_grad():
    torch.compile(linear)(torch.ones(4, 4), torch.ones(4, 4))
torch._dynamo.reset()
