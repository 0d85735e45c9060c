"""Planning without the machine: process groups that talk to nobody, and weights that take no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from mkcompile.errors import GroupError


@contextmanager
def fake_world(world_size: int) -> Iterator[None]:
    """A default process group of `world_size` ranks of which this is rank 0; its collectives do nothing.

    Raises: GroupError where a process group exists already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise GroupError("a process group exists already; a fake one can't be made beside it: leave out the world size")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(slots=True)
class _Faker:
    """Turns meta tensors into fake CPU tensors of the same sizes; a tensor seen twice stays one tensor."""

    mode: FakeTensorMode
    done: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "meta":
            return tensor
        if id(tensor) not in self.done:
            self.done[id(tensor)] = self._convert(tensor)
        return self.done[id(tensor)]

    def _convert(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            with self.mode:
                fake: Tensor = DTensor(  # type: ignore[no-untyped-call]
                    self._local(tensor._local_tensor), tensor._spec, requires_grad=False
                )
        else:
            fake = self._local(tensor)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)

    def _local(self, tensor: Tensor) -> Tensor:
        converter = self.mode.fake_tensor_converter
        return converter.from_meta_and_device(self.mode, tensor.detach(), torch.device("cpu"))


def on_meta(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Is any weight or input on the meta device?"""
    weights = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    leaves = [*weights, *tree_leaves((args, kwargs))]
    return any(isinstance(leaf, Tensor) and leaf.device.type == "meta" for leaf in leaves)


@contextmanager
def as_fake_cpu(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Sequence[Any], Mapping[str, Any]]]:
    """The arguments with meta tensors as fake CPU tensors; the model's weights likewise, until the block ends.

    The compiler would take a meta tensor for a real device; a fake CPU tensor goes the way that the passes know.
    """
    faker = _Faker(FakeTensorMode(allow_non_fake_inputs=True))
    undo: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in model.modules() if isinstance(model, nn.Module) else ():
        stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for store in stores:
            for name, tensor in store.items():
                if tensor is not None and tensor.device.type == "meta":
                    undo.append((store, name, tensor))
                    store[name] = faker(tensor)
    try:
        with faker.mode:
            yield tree_map_only(Tensor, faker, tuple(args)), tree_map_only(Tensor, faker, dict(kwargs))
    finally:
        for store, name, tensor in undo:
            store[name] = tensor
