"""Is a contender right? Its result and every gradient against eager's, and against fp32 where that is affordable."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .blocks import Workload
from .contenders import Call
from .huggingface import Inference

#: Of the whole tensor's norm: what two bf16 executions of a few blocks, with roundings at other places, may differ by.
FROM_EAGER = 3e-2
#: Against the truth: twice eager's error, and one rounding.
FACTOR, ROUNDING = 2.0, 2.0**-8
NUM_STEPS, STEP_SIZE = 20, 5e-3
#: Of the first loss: how far two curves may be apart.
CURVES_APART = 1e-2

Values = dict[str, Tensor]


def values_of(load: Workload, call: Call, train: bool) -> Values:
    """The result without gradients; or the result and all gradients. Of sharded tensors this rank's shard."""
    if not train:
        with torch.no_grad():
            return {"y": call(load.x).clone()}
    inputs = load.differentiated()
    y = call(load.x)
    gradients = torch.autograd.grad(y, list(inputs.values()), load.dy.to(y.dtype))
    found = {f"d {name}": _local(one).clone() for name, one in zip(inputs, gradients, strict=True)}
    return {"y": y.detach().clone(), **found}


def _local(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    if any(one.is_partial() for one in tensor.placements):
        return tensor.full_tensor()
    return tensor.to_local()


def in_fp32(load: Workload) -> Workload:
    """The same rounded weights, input and keys and values of earlier tokens, computed in fp32."""
    if load.again is not None:
        made = load.again()
        assert isinstance(made.module, Inference)
        made.module.float().hold_as(torch.float32)
        return made
    module = copy.deepcopy(load.module).float()
    return Workload(module=module, x=load.x.detach().float().requires_grad_(), dy=load.dy.float())


def truth_of(exact: Workload, train: bool) -> Values:
    """`values_of` a workload in fp32, one sample at a time where there are several: its attention keeps all scores."""
    if exact.again is not None or len(exact.x) == 1:
        return values_of(exact, exact.module, train)
    samples = zip(torch.split(exact.x.detach(), 1), torch.split(exact.dy, 1), strict=True)
    parts = (Workload(module=exact.module, x=x.clone().requires_grad_(), dy=dy) for x, dy in samples)
    found, rows = Values(), dict[str, list[Tensor]]()
    for part in parts:
        for name, value in values_of(part, part.module, train).items():
            if name in ("y", "d x"):
                rows.setdefault(name, []).append(value)
            else:
                found[name] = found[name].add_(value) if name in found else value
    return {**{name: torch.cat(values) for name, values in rows.items()}, **found}


def ratios(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, float]:
    """Norm of the difference over the norm, tensor by tensor, on this rank; infinite for what is not finite."""
    found = []
    for name, one in wanted.items():
        difference = (got[name].float() - one.float()).norm() / one.float().norm()
        found.append(torch.nan_to_num(difference, nan=torch.inf))
    return dict(zip(wanted, torch.stack(found).double().tolist(), strict=True))


def of_worst_rank(ratios: Mapping[str, float], host_group: dist.ProcessGroup) -> dict[str, float]:
    """Each tensor's largest over the ranks."""
    worst = torch.tensor(list(ratios.values()), dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=host_group)
    return dict(zip(ratios, worst.tolist(), strict=True))


def too_far(of_contender: Mapping[str, float], of_eager: Mapping[str, float] | None) -> str:
    """The first tensor that is wrong, or nothing. Both are distances from the truth, or `of_eager` is None."""
    for name, error in of_contender.items():
        allowed = FROM_EAGER if of_eager is None else FACTOR * of_eager[name] + ROUNDING
        if not error <= allowed:
            return f"{name} is off by {error:.2e}, allowed {allowed:.2e}"
    return ""


def loss_curve(load: Workload, call: Call, done: Callable[[], None]) -> list[float]:
    """The losses of 20 steps towards a random target; the weights are put back. `done` is called after each step.

    A step goes along the gradient by a fixed part of each weight's size: it learns at any scale, in bf16.
    """
    parameters = dict(load.module.named_parameters())
    kept = {name: _local(one.detach()).clone() for name, one in parameters.items()}
    losses = []
    for _ in range(NUM_STEPS):
        y = call(load.x)
        error = (y - load.dy).float()
        loss = error.square().mean()
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        with torch.no_grad():
            for parameter, gradient in zip(parameters.values(), gradients, strict=True):
                _descend(parameter, gradient)
        losses.append(loss.detach())
        done()
    with torch.no_grad():
        for name, parameter in parameters.items():
            _local(parameter).copy_(kept[name])
    shared = torch.stack(losses).double().cpu()
    return [round(value, 6) for value in shared.tolist()]


def _descend(parameter: Tensor, gradient: Tensor) -> None:
    weight, slope = _local(parameter), _local(gradient)
    sizes = (torch.linalg.vector_norm(one, dtype=torch.float32) for one in (weight, slope))
    weight.sub_(slope * (STEP_SIZE * next(sizes) / next(sizes).clamp_min(1e-30)))  # rounded once to the weight's type


def curve_distance(got: list[float], wanted: list[float], host_group: dist.ProcessGroup) -> float:
    """The largest difference of any step's losses over the first loss, on any rank; infinite for what is no number."""
    apart = max(abs(a - b) if a == a else math.inf for a, b in zip(got, wanted, strict=True))
    worst = torch.tensor(apart / abs(wanted[0]), dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=host_group)
    return float(worst)
