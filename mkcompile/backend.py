"""`torch.compile(model, backend="mkernel")`: Inductor with our pass in its post-grad hook.

The way from here: `mkernel` -> Inductor -> `passes.fusion_pass.FusionPass` -> `passes.fuse.fuse` -> the graph calls
`torch.ops.mkcompile.*` -> `ops.registry` -> the runtime's launcher -> a kernel (or the operator's reference).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from mkcompile.config import split_options
from mkcompile.errors import OptionError
from mkcompile.passes.fusion_pass import FusionPass

HOOK = "post_grad_custom_pre_pass"


class _Chain(CustomGraphPass):
    """Several passes as one, for versions of torch whose hook takes a single pass."""

    def __init__(self, passes: Sequence[Any]) -> None:
        self._passes = list(passes)

    def __call__(self, graph: fx.Graph) -> None:
        for one in self._passes:
            one(graph)

    def uuid(self) -> Any:
        """None (no caching) as soon as one of the passes has no uuid of its own."""
        uuids = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self._passes]
        return None if None in uuids else tuple(uuids)


def inductor_patches(options: dict[str, Any], mode: str | None) -> dict[str, Any]:
    """Inductor's settings for a `mode=` or `options=` of `torch.compile`.

    Raises: OptionError for a name that Inductor does not have.
    """
    patches: dict[str, Any] = dict(torch._inductor.list_mode_options(mode)) if mode else {}
    known = inductor_config.get_config_copy()
    for name, value in options.items():
        attribute = name.replace("-", "_")
        if attribute not in known:
            raise OptionError(f"unknown option {name!r}: neither Inductor's nor one that starts with 'mkernel.'")
        patches[attribute] = value
    return patches


def with_pass(patches: dict[str, Any], fusion: FusionPass) -> dict[str, Any]:
    """The settings with our pass behind whatever pass the user has in the same hook."""
    theirs = patches.get(HOOK, getattr(inductor_config, HOOK))
    if theirs is None:
        return {**patches, HOOK: fusion}
    chained = list(theirs) if isinstance(theirs, (list, tuple)) else [theirs]
    return {**patches, HOOK: _Chain([*chained, fusion])}


def mkernel(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """The backend's entry point; `options` may hold `mkernel.*` names and Inductor's own, `mode` is Inductor's.

    Raises: OptionError.
    """
    options, theirs = split_options(kwargs.get("options"))
    patches = inductor_patches(theirs, kwargs.get("mode"))
    return compile_fx(gm, example_inputs, config_patches=with_pass(patches, FusionPass(options)))
