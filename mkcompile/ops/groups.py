"""Process groups: operators know them by name, callers may hold them as objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from mkcompile.errors import GroupError

AnyGroup = str | ProcessGroup | DeviceMesh | None


#: torch's own look-up of a name, without checks; about 0.4 us. The cast: 2.11 takes a str, 2.13 a NewType of it.
find: Callable[[str], ProcessGroup] = cast(Any, _resolve_process_group)


def resolve(operator: str, name: str) -> ProcessGroup:
    """The group of that name.

    Raises: GroupError where this rank has none.
    """
    _check_initialised(operator)
    try:
        return find(name)
    except (RuntimeError, KeyError, ValueError) as error:
        known = ", ".join(sorted(dist.distributed_c10d._world.pg_names.values()))
        raise GroupError(f"{operator}: no process group named {name!r} on this rank, which has {known}") from error


def name_of(operator: str, group: AnyGroup) -> str:
    """The name of a group that is given by name, as an object, as a one-dimensional mesh, or as None (all ranks).

    Raises: GroupError.
    """
    _check_initialised(operator)
    if isinstance(group, str):
        return resolve(operator, group).group_name
    if isinstance(group, DeviceMesh):
        return _of_mesh(operator, group).group_name
    if group is None:
        world = dist.group.WORLD
        assert world is not None
        return world.group_name
    if isinstance(group, ProcessGroup):
        return resolve(operator, group.group_name).group_name
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise GroupError(f"{operator}: this rank is not in the group; only its members may call")
    raise GroupError(
        f"{operator}: give a group name, a ProcessGroup, a 1-D DeviceMesh or None, not {type(group).__name__}"
    )


def _of_mesh(operator: str, mesh: DeviceMesh) -> ProcessGroup:
    if mesh.ndim != 1:
        raise GroupError(
            f"{operator}: the mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names or ()}; "
            "give the one to communicate over, for example mesh['tp']"
        )
    return mesh.get_group()


def _check_initialised(operator: str) -> None:
    if not dist.is_initialized():
        raise GroupError(f"{operator}: no process group; call torch.distributed.init_process_group first")
