"""Gives operator calls to the runtime. Done when mkcompile is imported: a compile cache's hit runs no pass."""

from __future__ import annotations

import torch

from mkcompile.config import settings
from mkcompile.ops.registry import launcher, set_launcher
from mkcompile.runtime.agree import Agreement
from mkcompile.runtime.dispatch import Dispatch
from mkcompile.runtime.launcher import Launcher
from mkcompile.runtime.machine import own_basis
from mkcompile.runtime.network_reference import network_reference
from mkcompile.runtime.platform import Platform
from mkcompile.runtime.tactics import Planned


def install(trace: bool | None = None, platform: Platform | None = None) -> None:
    """From now on every operator call is agreed on by its group's ranks, and may be taken over by a kernel.

    `trace`: kernels write their timelines; None: as the settings say. `platform`: None: CUDA's.
    """
    agreement = Agreement(settings().timeout_s)
    launcher_of_gpus = Launcher(platform, Planned(own_basis, agreement), trace)
    set_launcher(Dispatch(agreement, launcher_of_gpus, network_reference()))


def kernels() -> Launcher | None:
    """The launcher in use; None where calls go elsewhere."""
    installed = launcher()
    found = installed.kernels if isinstance(installed, Dispatch) else None
    return found if isinstance(found, Launcher) else None


def check(*, synchronize: bool = True) -> None:
    """Raise what fused kernels of this process have reported, now instead of at the next operator call.

    A kernel that gives up still ends, and what it returned has no meaning: call this before results are used for good
    (a checkpoint, a metric, the end of a job). Without `synchronize` only kernels that have ended count, and it costs
    less than a microsecond: right after anything that waits for the results, such as `.item()`.
    Raises: PeerTimeoutError, LaunchMismatchError, LaunchOrderError, KernelFaultError, WorkspaceError.
    """
    found = kernels()
    if found is None:
        return
    if synchronize and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    found.check()
