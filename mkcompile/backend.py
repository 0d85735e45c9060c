"""`torch.compile(model, backend="mkernel")`: Inductor with our pass in its post-grad hook.

The way from here: `mkernel` -> Inductor -> `passes.fusion_pass.FusionPass` -> `passes.fuse.fuse` -> the graph calls
`torch.ops.mkcompile.*` -> `ops.registry` -> `runtime.dispatch` -> a kernel (or the operator's reference).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass
from torch._inductor.compile_fx import compile_fx
from torch._inductor.cudagraph_trees import reset_cudagraph_trees
from torch._inductor.custom_graph_pass import CustomGraphPass

from mkcompile import codegen
from mkcompile.config import OPTION_PREFIX, Options, near_text, option_names, settings, split_options
from mkcompile.errors import OptionError
from mkcompile.ops.problem import Problem
from mkcompile.passes import fusion_pass
from mkcompile.passes.groups_of_graph import asked_for, groups_of
from mkcompile.passes.judge import judge_for, kernels_first
from mkcompile.passes.reason import Reason
from mkcompile.passes.save_reduced import SaveReduced
from mkcompile.passes.uneven_shards import UnevenSizes, uneven_sizes
from mkcompile.plan import judge as planner
from mkcompile.plan.placement import placed
from mkcompile.runtime.machine import basis_of, enter, policy_of
from mkcompile.runtime.published import Basis

HOOK = "post_grad_custom_pre_pass"
JOINT_HOOK = "joint_custom_pre_pass"


class FusionPass(fusion_pass.FusionPass):
    """The pass with the planner behind it: what the backend uses, and usable alone in another Inductor configuration.

    `torch.compile(model, options={"post_grad_custom_pre_pass": mkcompile.FusionPass()})`, or
    `torch._inductor.config.post_grad_custom_pre_pass = mkcompile.FusionPass()`, also before there is a process group.

    Under `auto` a site is fused where the planner predicts a gain on the machine that `mkernel.topology` names: `probe`
    is this host's GPUs, and without CUDA a rehearsal, which decides as for that many H200s. `always` fuses whatever is
    legal, where sites exclude each other the one with a kernel here; `never` nothing.
    """

    def __init__(
        self,
        options: Options | None = None,
        groups: Sequence[str] | None = None,
        uneven: UnevenSizes | None = None,
    ) -> None:
        """`groups`: names of those that the graph communicates over; None: any of this process's. `uneven`: sizes
        that stand for a dimension of which a group's ranks have different sizes.
        """
        self._machine = (options or Options()).topology
        self._groups = groups
        super().__init__(options, self._judge_by_plan, self._known, self._judge_by_kernels, uneven)

    def judge(self, group: str, problem: Problem) -> tuple[Problem, float | Reason]:
        """By what the ranks of the group have told each other, and by how it lies on nodes."""
        basis = basis_of(self._machine, group)
        lying = placed(problem, basis.placement)
        judges = {"auto": self._judge_by_plan, "always": self._judge_by_kernels}
        judge = judges.get(self._options.fuse)
        return lying, self._judge(lying) if judge is None else judge(lying, basis)

    def adds(self, group: str, problem: Problem) -> bool:
        """By the kernel that the problem is planned with."""
        basis = basis_of(self._machine, group)
        policy = replace(policy_of(), fuse=self._options.fuse)
        return planner.adds(problem, basis.topology, policy, basis.tuned)

    def _judge_by_plan(self, problem: Problem, known: Basis | None = None) -> float | Reason:
        basis = known or basis_of(self._machine)
        return judge_for(basis.topology, policy_of(), basis.tuned)(problem)

    def _judge_by_kernels(self, problem: Problem, known: Basis | None = None) -> float | Reason:
        basis = known or basis_of(self._machine)
        return kernels_first(basis.topology, policy_of())(problem)

    def _known(self) -> str:
        """What decisions depend on: measured times are among it, but the same ones on all ranks of a group."""
        policy = policy_of()
        kernels = "all" if policy.available is None else ",".join(sorted(policy.available))
        names = fusion_pass.group_names() if self._groups is None else self._groups
        known = [f"{name} {_text(basis_of(self._machine, name))}" for name in names] or [_text(basis_of(self._machine))]
        return f"{known}{policy.reserve_sms} SMs left, kernels {kernels}"


def _text(basis: Basis) -> str:
    """A basis in the cache's key."""
    return f"{basis.topology.key()}{basis.tuned.to_json()}{basis.placement}"


class Chain(CustomGraphPass):
    """Several passes as one, for versions of torch whose hooks take a single pass (2.11)."""

    def __init__(self, passes: Sequence[Any]) -> None:
        self._passes = tuple(passes)

    def __call__(self, graph: fx.Graph) -> None:
        """Each pass in order."""
        for one in self._passes:
            one(graph)

    def uuid(self) -> Any:
        """None (no caching) as soon as one of the passes has no uuid of its own."""
        uuids = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self._passes]
        return None if None in uuids else tuple(uuids)


def inductor_patches(options: Mapping[str, Any], mode: str | None) -> dict[str, Any]:
    """Inductor's settings for a `mode=` or `options=` of `torch.compile`, checked as `backend="inductor"` checks them.

    Raises: OptionError for a name that Inductor does not have or a value of another type than its own.
    """
    known = inductor_config.get_config_copy()
    for name in options:
        if name.replace("-", "_") not in known:
            ours = [one.removeprefix(OPTION_PREFIX) for one in option_names()]
            whole = f" (did you mean {OPTION_PREFIX}{name}?)"
            near = whole if name in ours else near_text(name, [*option_names(), *known])
            raise OptionError(f"unknown option {name!r}; valid: {', '.join(option_names())}, and Inductor's own{near}")
    try:
        wrapper = torch._TorchCompileInductorWrapper(mode, dict(options), None)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise OptionError(str(error)) from error
    patches: dict[str, Any] = wrapper.config
    return patches


def with_pass(patches: Mapping[str, Any], ours: CustomGraphPass, hook: str = HOOK) -> dict[str, Any]:
    """The settings with our pass behind whatever passes the user has in the same hook."""
    theirs = patches.get(hook, getattr(inductor_config, hook))
    if theirs is None:
        return {**patches, hook: ours}
    passes = [*(theirs if isinstance(theirs, (list, tuple)) else [theirs]), ours]
    return {**patches, hook: passes if _hooks_take_lists() else Chain(passes)}


def with_joint_pass(patches: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """The settings with what has to be done before forward and backward are told apart."""
    return dict(patches) if options.fuse == "never" else with_pass(patches, SaveReduced(), JOINT_HOOK)


def _hooks_take_lists() -> bool:
    """True for the versions of torch that have learnt it."""
    return hasattr(custom_graph_pass, "get_custom_graph_passes")


def mkernel(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """The backend's entry point; `options` may hold `mkernel.*` names and Inductor's own, `mode` is Inductor's.

    Raises: OptionError; AbsentRankError for a rank of one of the graph's groups that never enters.
    """
    options, theirs = split_options(kwargs.get("options"))
    may_fuse = options.fuse != "never"
    groups = groups_of(gm, required=may_fuse)
    enter(options.topology, asked_for(gm, groups, may_fuse))  # a wrong name is an error here, and not inside a pass
    patches = with_joint_pass(inductor_patches(theirs, kwargs.get("mode")), options)
    fusion = FusionPass(options, groups, uneven_sizes(gm))
    compiled: Callable[..., Any] = compile_fx(gm, example_inputs, config_patches=with_pass(patches, fusion))  # type: ignore[assignment]
    return compiled


# torch._dynamo.reset() calls it, as it does for backend="inductor"
mkernel.reset = reset_cudagraph_trees  # type: ignore[attr-defined]


def _configure_logging() -> None:
    """`MKCOMPILE_LOG_LEVEL` speaks for itself: no handler of the user's is needed to see its lines."""
    logger = logging.getLogger("mkcompile")
    if settings().log_level != "WARNING":
        logger.setLevel(settings().log_level)
        logger.addHandler(logging.StreamHandler())


_configure_logging()
codegen.install()
